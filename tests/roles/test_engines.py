"""What the configuration says of a server reaches its engine."""

from mrl.config.policy_tables import ServerTable
from mrl.engines.bounds import Bounds
from mrl.roles.engines import bounds_of


def test_every_bound_of_a_server_is_the_configured_one(tmp_path):
    """Each is another number."""
    table = ServerTable(start_s=1.0, silence_s=2.0, stall_s=3.0, load_s=4.0)

    assert bounds_of(table, tmp_path) == Bounds(start_s=1.0, silence_s=2.0, stall_s=3.0, load_s=4.0)


def test_without_a_word_about_it_the_time_for_new_weights_follows_the_model(tmp_path):
    """Half a gigabyte of files without content."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(500_000_000)

    assert bounds_of(ServerTable(), tmp_path).load_s == 70.0
