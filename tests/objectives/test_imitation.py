"""SGT's term."""

from mrl.objectives.specs import Imitation


def test_imitation_is_the_negative_log_likelihood(make_inputs, check_term):
    """Each token costs its surprisal, with gradient -1 everywhere."""
    check_term(Imitation(), lambda row, _start, _updates: [-lp for lp in row.lp], make_inputs())
