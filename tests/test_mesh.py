"""Do ranks, coordinates and groups of a mesh fit together?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.mesh import AXES, Axis, Coordinate, Mesh

degrees = st.integers(min_value=1, max_value=4)
PURE = settings(deadline=None, max_examples=30)
meshes = st.builds(Mesh, dp=degrees, pp=degrees, cp=degrees, tp=degrees)


def test_ranks_count_through_tp_first_and_dp_last() -> None:
    mesh = Mesh(dp=2, pp=2, tp=2)
    at = [(c.dp, c.pp, c.cp, c.tp) for c in map(mesh.coordinate, range(8))]
    assert at == [
        (0, 0, 0, 0),
        (0, 0, 0, 1),
        (0, 1, 0, 0),
        (0, 1, 0, 1),
        (1, 0, 0, 0),
        (1, 0, 0, 1),
        (1, 1, 0, 0),
        (1, 1, 0, 1),
    ]


def test_the_groups_of_each_axis_written_out() -> None:
    mesh = Mesh(dp=2, pp=3, tp=2)
    assert mesh.size == 12
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
    assert mesh.groups("pp") == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    assert mesh.groups("dp") == ((0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11))
    assert mesh.groups("cp") == tuple((rank,) for rank in range(12))
    assert mesh.groups("pp", "cp", "tp") == ((0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11))


def test_context_parallel_ranks_lie_between_pipeline_and_tensor() -> None:
    mesh = Mesh(pp=2, cp=2, tp=2)
    assert mesh.groups("cp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))


@PURE
@given(meshes)
def test_rank_is_the_inverse_of_coordinate(mesh: Mesh) -> None:
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert [mesh.rank(coordinate) for coordinate in coordinates] == list(range(mesh.size))
    assert len(set(coordinates)) == mesh.size


@PURE
@given(meshes, st.sets(st.sampled_from(AXES)))
def test_groups_cover_every_rank_once_and_differ_on_their_axes_only(mesh: Mesh, axes: set[Axis]) -> None:
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert list(group) == sorted(group)
        for axis in set(AXES) - axes:
            assert len({getattr(mesh.coordinate(rank), axis) for rank in group}) == 1
        assert all(mesh.peers(rank, *axes) == group for rank in group)


@PURE
@given(meshes)
def test_a_group_along_one_axis_is_in_the_order_of_its_coordinate(mesh: Mesh) -> None:
    for axis in AXES:
        for group in mesh.groups(axis):
            assert [getattr(mesh.coordinate(rank), axis) for rank in group] == list(range(mesh.degree(axis)))


def test_a_coordinate_prints_every_axis() -> None:
    assert str(Coordinate(dp=0, pp=1, cp=0, tp=3)) == "dp=0 pp=1 cp=0 tp=3"


def test_a_degree_below_one_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^pp = 0; a degree must be at least 1$"):
        Mesh(pp=0)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_mesh_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"^rank {rank} is outside a mesh of 4 ranks$"):
        Mesh(tp=2, dp=2).coordinate(rank)
