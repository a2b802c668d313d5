"""The three architectures: in which order do stacks and head run?

    encoder_only      source -> encoder -> head
    decoder_only      target -> decoder -> head
    encoder_decoder   source -> encoder -> memory,   target -> decoder reading the memory -> head

Each is a loop over blocks. Every part may be absent: then its input comes from `hidden`, and what the slice ends with
is returned. Masks and biases are made once for all blocks of a stack.
"""

from models.attention import attention_mask
from models.batch import Batch
from models.config import Architecture, ModelConfig, keys_values_name
from models.model import Hidden, Model
from models.slicing import tie


class EncoderOnly(Model):
    """BERT's shape: every position reads every position of its sequence."""

    def forward(self, batch: Batch, hidden: Hidden) -> Hidden:
        """Enters with "source" unless it embeds; leaves with "source" or "logits"."""
        encoder = self.encoder
        assert encoder is not None
        embed = encoder.embedding
        source_LBD = hidden["source"] if embed is None else embed(batch.stream("source"), batch.token_types)
        mask = encoder.self_mask(batch.source_lengths, batch.stream_length("source"), source_LBD)
        for block in encoder.block.values():
            source_LBD = block(source_LBD, mask)
        if encoder.norm is None:
            return {"source": source_LBD}
        source_LBD = encoder.norm(source_LBD)
        assert self.head is not None
        return {"logits": self.head(source_LBD)}


class DecoderOnly(Model):
    """GPT's and LLaMA's shape: every position reads the past."""

    def forward(self, batch: Batch, hidden: Hidden) -> Hidden:
        """Enters with "target" unless it embeds; leaves with "target" or "logits"."""
        decoder = self.decoder
        assert decoder is not None
        embed = decoder.embedding
        target_LBD = hidden["target"] if embed is None else embed(batch.stream("target"), batch.token_types)
        mask = decoder.self_mask(batch.target_lengths, batch.stream_length("target"), target_LBD)
        for block in decoder.block.values():
            target_LBD = block(target_LBD, mask)
        if decoder.norm is None:
            return {"target": target_LBD}
        target_LBD = decoder.norm(target_LBD)
        assert self.head is not None
        return {"logits": self.head(target_LBD)}


class EncoderDecoder(Model):
    """T5's and BART's shape: the decoder reads the past of the target and, through the memory, the whole source."""

    def forward(self, batch: Batch, hidden: Hidden) -> Hidden:
        """Enters with "source", with "memory" or with "target" and "memory"; leaves likewise, or with "logits".

        The memory that leaves is the one that entered. Keys and values of blocks, "kv.3", enter instead of it where a
        slice before makes them, and leave where this one does.
        """
        encoder, decoder = self.encoder, self.decoder
        if encoder is not None:
            embed = encoder.embedding
            source_SBD = hidden["source"] if embed is None else embed(batch.stream("source"), batch.token_types)
            mask = encoder.self_mask(batch.source_lengths, batch.stream_length("source"), source_SBD)
            for block in encoder.block.values():
                source_SBD = block(source_SBD, mask)
            if encoder.norm is None:
                return {"source": source_SBD}
            memory_SBD = encoder.norm(source_SBD)
        else:
            memory_SBD = hidden.get("memory")
        left: Hidden = {} if memory_SBD is None else {"memory": memory_SBD}
        if decoder is None:
            return left
        read_SBD = None
        if decoder.memory is not None:
            read_SBD = decoder.memory(memory_SBD)
            left |= {keys_values_name(index): make(read_SBD) for index, make in decoder.makers.items()}
        if not decoder.blocks_here:
            return left
        embed = decoder.embedding
        target_LBD = hidden["target"] if embed is None else embed(batch.stream("target"))
        mask = decoder.self_mask(batch.target_lengths, batch.stream_length("target"), target_LBD)
        memory_mask = attention_mask(
            is_causal=False,
            key_lengths=batch.source_lengths,
            key_length=batch.stream_length("source"),
            like=target_LBD,
        )
        for index, block in decoder.blocks_here.items():
            target_LBD = block(target_LBD, mask, hidden.get(keys_values_name(index), read_SBD), memory_mask)
        if decoder.norm is None:
            return {"target": target_LBD, **left}
        target_LBD = decoder.norm(target_LBD)
        assert self.head is not None
        return {"logits": self.head(target_LBD)}


ARCHITECTURES: dict[Architecture, type[Model]] = {
    "encoder_only": EncoderOnly,
    "decoder_only": DecoderOnly,
    "encoder_decoder": EncoderDecoder,
}


def build(config: ModelConfig) -> Model:
    """The whole model, tied, on the current default device; the values of its parameters are undefined."""
    model = ARCHITECTURES[config.architecture](config)
    tie(model, config)
    return model
