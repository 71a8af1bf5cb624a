"""How many examples a property test is shown: few in `make test`, more in `make test-slow`.

The profile decides (`pytest --hypothesis-profile thorough`): 25 examples, the same in every run, or
300 of a new seed. A property whose examples cost much scales with it:

    @given(...)
    @examples(8)  # 8 where others have 25, 96 where they have 300
"""

from hypothesis import HealthCheck, settings

QUICK, THOROUGH = 25, 300


def register_profiles() -> None:
    """Let Hypothesis know both, and begin with the quick one."""
    # A busy machine draws slowly; that says nothing about the code.
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("quick", patient, max_examples=QUICK, derandomize=True)
    settings.register_profile("thorough", patient, max_examples=THOROUGH, print_blob=True)
    settings.load_profile("quick")


def examples(number: int) -> settings:
    """Settings of a property that is shown `number` examples by the quick profile.

    Read when the module is imported, so after pytest has loaded the profile it was asked for.
    """
    return settings(max_examples=max(1, number * settings().max_examples // QUICK))
