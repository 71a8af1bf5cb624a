"""What the project promises, in words; tests and drills say which of it they prove.

    @proves(Promise.ONE_RETRAINING, "10,000 duplicates: one run")
    def test_a_storm(): ...

`pytest -m promise` runs them.
"""

from enum import StrEnum

import pytest


class Promise(StrEnum):
    """Promises of the design by their number, then what people complain of elsewhere."""

    VALIDATED = "1 Nothing trains on data that was not validated, nothing unproven is promoted"
    NO_FUTURE = "2 No future in the past"
    SAME_FEATURES = "3 Same features offline and online"
    INTERRUPT = "4 Interrupt anything, anywhere"
    NO_FALLBACK = "5 No silent fallback"
    NO_ORPHANS = "6 No orphans"
    ONE_RETRAINING = "7 One drift incident, one retraining"
    CONVERSION = "8 Conversion proves itself"
    TRACED = "9 Every number can be traced"
    SENTENCE = "10 Bad input gets a clear error"
    BAD_DATE = "Complaint: a bad date poisons materialization"
    DRIFT_BURST = "Complaint: a burst of drift events starts many runs"
    LOST_EVENT = "Complaint: a lost event is never answered"
    KILLED_WORKER = "Complaint: a killed worker leaves runs Running"
    EVICTION = "Complaint: an eviction loses the work"
    REDEPLOY = "Complaint: a redeploy forgets the cool-down"
    FULL_DISK = "Complaint: a full disk leaves damage"
    CLOCK_JUMP = "Complaint: a clock jump stops or repeats everything"
    TOLD = "Complaint: nobody hears of trouble, or a log tells secrets"
    TWO_PLATFORMS = "Complaint: two platforms on one database act twice"


def proves(promise: Promise, end_state: str) -> pytest.MarkDecorator:
    """A test or drill that tries to break a promise.

    Args:
        promise: which.
        end_state: what is asserted in the end, in a few words.
    """
    return pytest.mark.promise(promise, end_state)
