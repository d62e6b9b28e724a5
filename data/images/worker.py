"""Decode images in a process of its own (`python -m data.images.worker`, from `data.images.ahead`).

It is given a socket, the settings of a `Pictures` and the names of the arrays that are wanted, and answers each list of
images in their order. It ends when nobody holds the other end.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # as data.tokenized.builder: half the time, a third of memory
    from data.errors import DataError
    from data.images.image import Image
    from data.images.messages import receive, send
    from data.images.pictures import Pictures

    channel = socket.socket(fileno=int(sys.argv[1]))
    folder, least, most, names = json.loads(sys.argv[2])
    pictures = None
    while (message := receive(channel)) is not None:
        for ticket, images in message[0]["jobs"]:
            try:
                pictures = pictures or Pictures(Path(folder), least, most)
                made = pictures.arrays([Image(*each) for each in images])
                answer, arrays = {"ticket": ticket}, {name: made[name] for name in names}
            except DataError as error:
                answer, arrays = {"ticket": ticket, "error": list(error.args)}, {}
            try:
                send(channel, answer, arrays)
            except ConnectionError:  # the run has ended
                return


if __name__ == "__main__":
    main()
