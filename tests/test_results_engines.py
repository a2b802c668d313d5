"""Do runs of other engines stand in the tables without changing what is said of the native one?"""

from pathlib import Path

import pandas as pd

from results.claims import judge_all
from results.load import load_records
from results.report import report
from results.tables import RECORDED, build
from tests.records import by_another_engine, study, write


def test_verdicts_do_not_read_other_engines() -> None:
    records = study()
    others = [by_another_engine(record) for record in records]
    both, alone = build([*records, *others]), build(records)
    assert list(judge_all(both)) == list(judge_all(alone))
    assert len(both.runs) == 2 * len(alone.runs)
    for name in RECORDED:
        assert len(getattr(both.native, name)) == len(getattr(alone, name)), name


def test_what_an_engine_cannot_tell_is_empty_and_what_it_sent_is_told() -> None:
    native = study()[0]
    first, second = build([native, by_another_engine(native)]).runs.to_dict("records")
    assert second["engine"] == "torch"
    assert second["sent_bytes"] == first["sent_bytes"] > 0
    assert second["step_seconds_median"] == 2 * first["step_seconds_median"]
    assert first["peak_saved_bytes"] > 0
    for name in ("peak_saved_bytes", "forward_flops", "parameters", "bubble", "ledger_matches_recorder"):
        assert pd.isna(second[name]), name


def test_a_report_of_two_engines_says_which_one_it_speaks_of(tmp_path: Path) -> None:
    records = study()
    write(tmp_path / "records", [*records, *map(by_another_engine, records)])
    assert load_records(tmp_path / "records").refused == ()
    text = report(tmp_path / "records", tmp_path).path.read_text(encoding="utf-8")
    assert f"is of the native engine. Of other engines ({len(records)} of torch)" in text
    assert "not confirmed event for event" not in text
