"""Programs that the script starts: no rule of Python reaches them."""

from __future__ import annotations

from tests.no_harm.way import Way, of_shell

_SHELL = (
    "rm old.txt",
    "rm -rf folder",
    "rm -rf runs/*",
    "cp source.txt old.txt",
    "cp -r folder copy",
    "cp -a folder/. runs",
    "mv source.txt old.txt",
    "mv folder moved",
    "echo n > old.txt",
    "echo n >> train.log",
    "echo n > new.txt",
    ": > metrics.csv",
    "exec 3<> old.txt; echo n >&3",
    "cat source.txt | tee old.txt",
    "sed -i s/old/new/ old.txt",
    "dd if=/dev/zero of=old.bin bs=1 count=8 conv=notrunc",
    "truncate -s 0 old.txt",
    "touch old.txt",
    "touch -d 2001-01-01 folder",
    "tar xf pack.tar",
    "tar cf pack.tar folder",
    "gzip old.txt",
    "unzip -o pack.zip",
    "rsync -a --delete empty/ folder/",
    "find . -name '*.pt' -delete",
    "find folder -type f | xargs rm",
    "ln -sf source.txt link",
    "ln old.txt linked",
    "unlink link",
    "install -m 600 source.txt old.txt",
    "chmod -R 700 folder",
    "rmdir empty",
    "mkdir -p made/deep",
    "mkfifo pipe",
    "mktemp ./left.XXXXXX",
    "split -b 1024 old.bin part.",
    "sort -r -o metrics.csv metrics.csv",
    "perl -pi -e s/old/new/ old.txt",
    "awk '{print > \"old.txt\"}' metrics.csv",
    "shred -n 1 -u old.txt",
)
_GIT = (
    "git commit -am more",
    "git reset --hard",
    "git clean -fdx",
    "git stash",
    "git checkout -- .",
    "git checkout -f other",
    "git gc --prune=now",
    "git branch -D other",
    "git tag now",
    "git add -A",
    "git rm -f file_0",
    "git mv file_0 moved",
    "git config user.name B",
    "git worktree add ../elsewhere other",
)
_SQLITE = (
    "sqlite3 base.db 'insert into t values (2)'",
    "sqlite3 base.db 'drop table t'",
    "sqlite3 base.db '.backup new.db'",
    "sqlite3 base.db vacuum",
)
_C = {
    "overwrite": "'overwrite', 'old.txt'",
    "unlink": "'unlink', 'old.txt'",
    "rename": "'rename', 'source.txt', 'old.txt'",
    "exchange": "'exchange', 'source.txt', 'old.txt'",
    "shared mapping": "'map', 'old.bin'",
    "truncate": "'truncate', 'old.txt'",
    "chmod": "'chmod', 'old.txt'",
    "hard link": "'link', 'old.txt', 'linked'",
    "rmdir": "'rmdir', 'empty'",
}

PROGRAMS = (
    *of_shell("shell", _SHELL),
    *of_shell("git", _GIT, folder="repository"),
    *of_shell("sqlite3", _SQLITE),
    *(
        Way(name=name, language="C", body=f"run([HELPER, {words}])", by="program", says="helper", needs=("cc",))
        for name, words in _C.items()
    ),
)
