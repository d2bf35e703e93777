"""Which states of a disk a power cut can leave, by the rules of each model."""

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.audit.history import History
from keepstep.audit.operations import ROOT, Beginning
from keepstep.audit.states import CrashModel, Known


def empty():
    return History(Beginning(entries={}, contents={}, links={}, folders=frozenset({ROOT})))


def create(history, name, folder=ROOT):
    inode = history.new_inode()
    history.change(f"create {name}", ((folder, name), inode))
    return inode


def make_folder(history, name, folder=ROOT):
    inode = history.new_inode()
    history.names.folders.add(inode)
    history.change(f"make folder {name}", ((folder, name), inode))
    return inode


def rename(history, old, new, folder=ROOT):
    inode = history.names.entries[folder, old]
    history.change(f"rename {old} to {new}", ((folder, old), None), ((folder, new), inode))


def states(history, model="weak", limit=10**6):
    """Every state that may be there, at any moment: {path: content} as a frozenset of pairs."""
    known, found = Known(), set()
    crashes = CrashModel(history.recording([]), model, limit=limit, known=known)
    for cut in crashes.cuts():
        for state in cut.states:
            found.add(frozenset((path, text) for path, _, _, text in known.tree(state.key)))
    return found


def at_the_end(history, model="weak"):
    """The states that may be there when all is done."""
    known = Known()
    crashes = CrashModel(history.recording([]), model, limit=10**6, known=known)
    for cut in crashes.cuts():
        found = [{path: text for path, _, _, text in known.tree(state.key)} for state in cut.states]
    return found


def test_a_synced_file_in_a_synced_folder_is_there():
    history = empty()
    inode = create(history, "a")
    history.write(inode, 0, b"new")
    history.sync(inode, "fsync")
    history.sync(ROOT, "fsync")
    assert at_the_end(history) == [{"a": b"new"}]
    assert at_the_end(history, "journal") == [{"a": b"new"}]


def test_a_synced_file_need_not_have_its_name_unless_the_journal_carries_it():
    history = empty()
    inode = create(history, "a")
    history.write(inode, 0, b"new")
    history.sync(inode, "fsync")
    assert at_the_end(history) == [{"a": b"new"}, {}]
    assert at_the_end(history, "journal") == [{"a": b"new"}]


def test_a_name_need_not_have_its_bytes():
    history = empty()
    inode = create(history, "a")
    history.write(inode, 0, b"new")
    history.sync(ROOT, "fsync")
    for model in ("weak", "journal"):
        found = [state["a"] for state in at_the_end(history, model)]
        assert set(found) == {b"new", b"", bytes(3)}, model


def test_a_rename_over_a_whole_file_may_leave_an_empty_one():
    history = empty()
    old = create(history, "final")
    history.write(old, 0, b"old")
    history.sync(old, "fsync")
    history.sync(ROOT, "fsync")
    new = create(history, "tmp")
    history.write(new, 0, b"new")
    rename(history, "tmp", "final")
    for model in ("weak", "journal"):
        found = at_the_end(history, model)
        assert {"final": b""} in found
        assert {"final": b"old"} in found
        assert {"final": b"new"} in found
        # A rename is one step: never neither.
        assert all("final" in state for state in found)


def test_names_survive_in_any_order_in_weak_and_in_theirs_in_a_journal():
    history = empty()
    for name in ("a", "b"):
        create(history, name)
    both = [{"a": b"", "b": b""}, {"a": b""}, {"b": b""}, {}]
    assert sorted(map(sorted, at_the_end(history))) == sorted(map(sorted, both))
    assert {"b": b""} not in at_the_end(history, "journal")
    assert len(at_the_end(history, "journal")) == 3


def test_a_rename_between_folders_is_durable_when_both_are_synced():
    history = empty()
    one, other = make_folder(history, "one"), make_folder(history, "other")
    inode = create(history, "f", one)
    for folder in (ROOT, one):
        history.sync(folder, "fsync")
    history.change("rename", ((one, "f"), None), ((other, "f"), inode))
    history.sync(other, "fsync")
    places = [set(state) - {"one", "other"} for state in at_the_end(history)]
    assert places == [{"other/f"}, {"one/f"}]
    history.sync(one, "fsync")
    assert [set(s) - {"one", "other"} for s in at_the_end(history)] == [{"other/f"}]


def test_what_builds_on_an_entry_makes_it_durable_too():
    history = empty()
    one, other = make_folder(history, "one"), make_folder(history, "other")
    for folder in (ROOT, one, other):
        history.sync(folder, "fsync")
    inode = create(history, "f", one)
    history.change("rename", ((one, "f"), None), ((other, "g"), inode))
    history.change("remove other/g", ((other, "g"), None))
    history.sync(other, "fsync")
    # The removal is durable, and cannot be without the rename that brought what it removes.
    assert [set(state) for state in at_the_end(history)] == [{"one", "other"}]


def test_what_is_in_a_folder_without_a_name_is_not_there():
    history = empty()
    folder = make_folder(history, "d")
    inode = create(history, "f", folder)
    history.write(inode, 0, b"x")
    history.sync(inode, "fsync")
    history.sync(folder, "fsync")
    assert {} in at_the_end(history)
    history.sync(ROOT, "fsync")
    assert at_the_end(history) == [{"d": b"", "d/f": b"x"}]


def test_blocks_of_one_file_survive_apart():
    history = empty()
    inode = create(history, "a")
    history.sync(ROOT, "fsync")
    history.write(inode, 0, b"1" * 4096 + b"2" * 4096)
    found = [state["a"] for state in at_the_end(history)]
    assert b"1" * 4096 + bytes(4096) in found
    assert bytes(4096) + b"2" * 4096 in found
    assert b"1" * 4096 in found
    assert bytes(8192) in found


def test_a_file_that_is_truncated_to_be_written_anew_may_be_empty():
    history = empty()
    inode = create(history, "a")
    history.write(inode, 0, b"old")
    history.sync(inode, "fsync")
    history.sync(ROOT, "fsync")
    history.resize(inode, 0)
    history.write(inode, 0, b"newer")
    found = [state["a"] for state in at_the_end(history)]
    assert {b"newer", b"old", b"", b"new", bytes(5)} - set(found) == {bytes(5)}
    assert b"old" + bytes(2) in found


def test_a_hard_link_shows_the_same_bytes_under_both_names():
    history = empty()
    inode = create(history, "a")
    history.write(inode, 0, b"x")
    history.change("link b", ((ROOT, "b"), inode))
    history.sync(ROOT, "fsync")
    assert all(state["a"] == state["b"] for state in at_the_end(history))


def test_sync_makes_everything_durable():
    history = empty()
    for name in ("a", "b"):
        history.write(create(history, name), 0, b"x")
    history.sync(None, "sync")
    assert at_the_end(history) == [{"a": b"x", "b": b"x"}]


def test_where_there_are_more_than_the_limit_it_is_said_and_the_extremes_are_there():
    history = empty()
    for number in range(9):
        history.write(create(history, f"f{number}"), 0, b"x" * 9000)
    known = Known()
    crashes = CrashModel(history.recording([]), "weak", limit=3000, known=known)
    (cut,) = crashes.cuts()
    found = [{p: t for p, _, _, t in known.tree(state.key)} for state in cut.states]
    assert len(found) == 3000
    assert crashes.bounded
    assert {f"f{number}": b"x" * 9000 for number in range(9)} in found
    assert {f"f{number}": b"" for number in range(9)} in found
    assert {} in found


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["create", "write", "rename", "remove", "sync", "sync folder"]),
        st.sampled_from("abc"),
        st.sampled_from("abc"),
    ),
    max_size=9,
)


def carried_out(operations):
    """Carry out what can be; return the history and what a reader saw after each operation."""
    history, seen = empty(), []
    for kind, name, other in operations:
        inode = history.names.entries.get((ROOT, name))
        if kind == "create" and inode is None:
            create(history, name)
        elif kind == "write" and inode is not None:
            history.write(inode, history.size(inode), other.encode())
        elif kind == "rename" and inode is not None and name != other:
            rename(history, name, other)
        elif kind == "remove" and inode is not None:
            history.change(f"remove {name}", ((ROOT, name), None))
        elif kind == "sync" and inode is not None:
            history.sync(inode, "fsync")
        elif kind == "sync folder":
            history.sync(ROOT, "fsync")
        seen.append(
            frozenset((n, history.content(i, 0, 99)) for (_, n), i in history.names.entries.items())
        )
    return history, seen


@settings(deadline=None, max_examples=150)
@given(OPERATIONS)
def test_what_a_killed_process_leaves_is_one_of_the_states_and_a_journal_allows_no_more(operations):
    history, seen = carried_out(operations)
    weak, journal = states(history), states(history, "journal")
    assert journal <= weak
    assert set(seen) <= weak
    assert set(seen) <= journal
