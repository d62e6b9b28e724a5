"""Asks a server by OpenAI's own client: `python ask_openai.py ADDRESS METHOD FIELDS`, with a JSON object of arguments.

METHOD is `chat.completions.create` or the like. Prints the answer as JSON, of a stream the list of its events. It is
run by a Python that has openai, and imports nothing of the project.
"""

import json
import operator
import sys

from openai import OpenAI


def main() -> None:
    address, method, fields = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    client = OpenAI(base_url=address, api_key="none", max_retries=0)
    answer = operator.attrgetter(method)(client)(**fields)
    print(json.dumps([each.model_dump() for each in answer] if fields.get("stream") else answer.model_dump()))


if __name__ == "__main__":
    main()
