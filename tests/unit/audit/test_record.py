"""What is recorded of real commands, and that it leads to what they left."""

import re
import shutil
import sys

import pytest

from keepstep.audit.names import look_at
from keepstep.audit.operations import ROOT, Acknowledged
from keepstep.audit.record import record
from keepstep.audit.states import CrashModel, Known

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def recorded(folder, code, *, ack=None):
    command = [sys.executable, "-I", "-c", code, str(folder)]
    return record(command, folder, acknowledged=re.compile(ack) if ack else None)


def left_by(recording):
    """The files that the recorded operations lead to, when all of them have happened."""
    known = Known()
    crashes = CrashModel(recording, "weak", limit=1, known=known)
    for operation in recording.operations:
        crashes.apply(operation)
    return {path: content for path, kind, _, content in known.tree(crashes.whole()) if kind}


def really_there(folder):
    beginning = look_at(folder)
    names = dict(beginning.contents)
    names |= {inode: text.encode() for inode, text in beginning.links.items()}
    paths = {ROOT: ""}
    waiting, found = [ROOT], {}
    while waiting:
        above = waiting.pop()
        for (folder_inode, name), inode in beginning.entries.items():
            if folder_inode == above:
                path = f"{paths[above]}/{name}".lstrip("/")
                found[path] = names.get(inode, b"")
                if inode in beginning.folders:
                    paths[inode] = path
                    waiting.append(inode)
    return found


WAYS = {
    "a name that is no plain text": "open('a é\\n<>, \".bin', 'wb').write(b'x')",
    "append": "open('old', 'ab').write(b'more')",
    "truncate": "open('old', 'wb').write(b'n'); os.truncate('old', 5)",
    "seek and write": "f = open('old', 'r+b'); f.seek(2); f.write(b'XX'); f.seek(20);"
    " f.write(b'!')",
    "pwrite": "d = os.open('old', os.O_RDWR); os.pwrite(d, b'PP', 1); os.write(d, b'ww')",
    "vectors": "d = os.open('v', os.O_CREAT | os.O_RDWR); os.writev(d, [b'a', b'bc']);"
    " os.pwritev(d, [b'1', b'2'], 1)",
    "rename over": "open('t', 'wb').write(b'new'); os.replace('t', 'old')",
    "rename a folder": "os.mkdir('d'); open('d/f', 'wb').write(b'f'); os.rename('d', 'e');"
    " open('e/g', 'wb').write(b'g')",
    "links": "os.link('old', 'hard'); os.symlink('old', 'soft'); open('soft', 'ab').write(b's');"
    " os.unlink('old')",
    "a descriptor of a folder": "d = os.open('.', os.O_RDONLY); os.mkdir('s', dir_fd=d);"
    " e = os.open('s/f', os.O_CREAT | os.O_WRONLY, dir_fd=d); os.write(e, b'in s')",
    "another working folder": "os.mkdir('w'); os.chdir('w'); open('f', 'wb').write(b'w');"
    " os.rename('f', '../out')",
    "a child with the same descriptor": "f = os.open('c', os.O_CREAT | os.O_WRONLY);"
    " os.write(f, b'1'); p = os.fork(); os.write(f, b'2' if p else b'3');"
    " p and os.waitpid(p, 0); p and os.write(f, b'4'); p or os._exit(0)",
    "threads": "def w(n):\n  open(f't{n}', 'wb').write(bytes([n]) * 9)\n"
    "import threading\nt = [threading.Thread(target=w, args=(n,)) for n in range(4)]\n"
    "[x.start() for x in t]; [x.join() for x in t]",
    "a copy by the kernel": "import shutil; shutil.copyfile('old', 'copy')",
    "a duplicate": "f = os.open('d', os.O_CREAT | os.O_WRONLY); g = os.dup(f); os.close(f);"
    " os.write(g, b'x'); h = os.dup2(g, 40); os.write(40, b'y')",
    "removed and made again": "os.unlink('old'); open('old', 'wb').write(b'again')",
    "a program that is run": "import subprocess;"
    " subprocess.run(['sh', '-c', 'echo hi > sh; mv sh sh2; cat old >> sh2'])",
}


@pytest.mark.parametrize("way", WAYS)
def test_the_record_leads_to_what_is_there(tmp_path, way):
    (tmp_path / "old").write_bytes(b"0123456789")
    recording = recorded(tmp_path, f"import os, sys; os.chdir(sys.argv[1])\n{WAYS[way]}")
    assert recording.exit_code == 0
    assert recording.doubts == []
    assert left_by(recording) == really_there(tmp_path)


def test_syncs_are_recorded_with_what_they_make_durable(tmp_path):
    code = """
import os, sys
os.chdir(sys.argv[1])
f = open("a", "wb"); f.write(b"x"); f.flush(); os.fsync(f.fileno()); os.fdatasync(f.fileno())
d = os.open(".", os.O_RDONLY); os.fsync(d); os.sync()
s = os.open("s", os.O_CREAT | os.O_WRONLY | os.O_DSYNC); os.write(s, b"through")
"""
    texts = [operation.text for operation in recorded(tmp_path, code).operations]
    wanted = ["fsync a", "fdatasync a", "fsync .", "sync", "write through (O_SYNC) s"]
    assert [text for text in texts if text in wanted] == wanted


def test_a_command_acknowledges_by_its_output_or_by_asking_for_a_marker(tmp_path):
    code = """
import os, sys
print("saving 1", flush=True)
sys.stdout.write("sav"); sys.stdout.flush(); print("ed 1", flush=True)
os.path.exists("/.keepstep/acknowledged/not this way")
try: open("/.keepstep/acknowledged/step 2")
except OSError: pass
"""
    found = recorded(tmp_path, code, ack="^saved").operations
    assert [o.text for o in found if isinstance(o, Acknowledged)] == ["saved 1", "step 2"]


def test_what_cannot_be_followed_is_said(tmp_path):
    code = """
import mmap, os, sys
f = open(sys.argv[1] + "/m", "w+b"); f.write(bytes(10)); f.flush()
m = mmap.mmap(f.fileno(), 10); m[0] = 1
"""
    (doubt,) = recorded(tmp_path, code).doubts
    assert "m is written by mmap" in doubt
