"""What of the machine does not fit a config."""

from keepstep.config.surroundings import folder_fault
from tests.helpers.child import as_nobody


def test_a_folder_without_rights_says_what_to_look_at(tmp_path):
    place = tmp_path / "closed"
    place.mkdir(mode=0o555)

    def work() -> None:
        said = f"{place} cannot be written into: look at who owns it and what it allows"
        assert folder_fault(place) == folder_fault(place / "run") == said

    assert as_nobody(work, place) == 0
