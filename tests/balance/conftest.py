"""Settings of the property tests."""

from hypothesis import settings

# A busy machine makes any example slow: time is no property under test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
