"""Run by its path, as ``python warm_process.py SOCKET``: a process that is kept warm for one rank of many tests.

It waits for the first message, which says where modules are imported from, before it imports anything of ours.
"""

import json
import socket
import sys

if __name__ == "__main__":
    control = socket.socket(fileno=int(sys.argv[1]))
    first = json.loads(control.recv(1 << 16))
    sys.path[:] = first["path"]
    from ddpdoctor.testing.warm_rank import serve

    serve(control, first)
