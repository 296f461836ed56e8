"""`meshwright` for tests: has the server run the command with this process's arguments, folder, variables and streams.

python client.py SOCKET ARGUMENTS…              meshwright ARGUMENTS…
python client.py SOCKET --python ARGUMENTS…     python ARGUMENTS…
"""

import array
import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    request = {"words": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    code = array.array("i", server.recv(4))[0]
if code < 0:  # died of a signal: so does this process
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
