"""How user turns begin: openings that make the target write chat, code and maths requests.

Left alone, a small model writes mostly chat. An opening is a few words to a few lines; the target
goes on from there. The code openings have the form of HumanEval's prompts, a function's head and an
open docstring, and some signatures are found there too; `data` redraws a function that HumanEval
asks for and drops every row that shares 13 tokens in a row with an evaluation prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

STYLES = ("chat", "code", "math")
MIX = (0.35, 0.35, 0.30)


class Seed(NamedTuple):
    """One opening of a user turn."""

    text: str
    style: str
    user_limit: int  # most tokens that the target may add to it
    quote_limit: int = 0  # the turn ends at this many docstring quotes beyond the text's own


def draw_seed(rng: np.random.Generator, style: str) -> Seed:
    """A random opening of one style."""
    return {"chat": _chat, "code": _code, "math": _math}[style](rng)


def _pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]


_CHAT_STARTS = tuple(
    """Write a|Write an essay about|Write a short story about|Write a letter to|Write an email|
    Explain|Explain how|Explain why|Explain the difference between|Imagine you are|Imagine that|
    Pretend to be|Act as|You are a|Suppose that|Compose|Compose a poem|Draft|Describe|
    Describe how|Describe a|Given the following|Given that|Summarize|Rewrite the following|
    Edit the following|Extract|Read the following passage|Identify|Classify|Analyze|Evaluate|
    Compare|Discuss|List|List three|Give me|Give an example of|What is|What are|What would|
    What if|How do|How does|How can I|How would you|Why do|Why is|Who was|When did|Which|
    Can you|Could you|Tell me about|I want to|I need|I have a|I am|My|Help me|Help me write|
    Please|Please provide|Design|Develop a|Create a|Outline|Provide|Recommend|Suggest|Translate|
    Do you|Is it|Are there|If|In the|The|Here is|Let's|Consider|Propose|Craft|
    Answer the following question|Determine|Plan""".split("|")
)
_CHAT_STARTS = tuple(start.strip() for start in _CHAT_STARTS)


def _chat(rng: np.random.Generator) -> Seed:
    text = "" if rng.random() < 0.4 else _pick(rng, _CHAT_STARTS)
    return Seed(text, "chat", 96)


_VERBS = tuple(
    """count find remove sort get is sum compute check convert reverse filter merge split max min
    make group replace rotate parse format validate encode decode generate calculate select join
    compare extract longest shortest first last common unique evaluate insert shift move match
    has total average flatten zip""".split()
)
_NOUNS = tuple(
    """vowels primes duplicates elements words numbers digits characters pairs strings list
    substring palindrome anagram brackets factors divisors matrix rows columns prefix suffix
    integers evens odds squares cubes sequence intervals dates times temperature binary hex
    letters sentence consonants even_numbers odd_digits positives negatives triangle area
    fibonacci median mode range sublist subarray tokens keys values dictionary tuple path
    spaces tail head index""".split()
)
_SIGNATURES = (
    "(numbers: List[int]) -> int",
    "(numbers: List[int]) -> List[int]",
    "(numbers: List[float]) -> float",
    "(numbers: List[float], threshold: float) -> bool",
    "(strings: List[str]) -> str",
    "(strings: List[str], prefix: str) -> List[str]",
    "(s: str) -> bool",
    "(s: str) -> str",
    "(text: str) -> int",
    "(string: str, substring: str) -> int",
    "(n: int) -> int",
    "(n: int) -> List[int]",
    "(n: int) -> bool",
    "(a: int, b: int) -> int",
    "(x: int, y: int, z: int) -> bool",
    "(values: List[Any]) -> List[int]",
    "(lst)",
    "(s)",
    "(n)",
    "(arr)",
    "(arr, k)",
    "(a, b)",
    "(x, n)",
    "(text)",
    "(string)",
    "(numbers)",
    "(lst1, lst2)",
    "(words)",
    "(d)",
    "(grid, k)",
)
_CODE_STARTS = tuple(
    """Write a Python function|Write a Python function to|Write a Python function that takes|
    Write a function|Write a function that|Write a Python program|Write a Python script|
    Write a Python class|Implement a function|Implement|Create a Python function|
    Write code to|Write a program|Write a JavaScript function|Write a C++ program|
    Write a SQL query|Develop a Python program|Given a list of integers,|Given a string,|
    Given an array of|Fix the following code|Here is a Python function:\n\n```python\ndef|
    What does this code do?\n\n```python\n|Explain this Python code:\n\n```python\n|
    How do I|In Python, how|Write a recursive function|Write a unit test for|Use Python to""".split(
        "|"
    )
)
_CODE_STARTS = tuple(start.strip() for start in _CODE_STARTS)


def _function_head(rng: np.random.Generator) -> str:
    """The first lines of a function that is to be completed, up to its open docstring."""
    name = f"{_pick(rng, _VERBS)}_{_pick(rng, _NOUNS)}"
    signature = _pick(rng, _SIGNATURES)
    imports = ""
    if "List" in signature:
        imports = (
            "from typing import List, Any\n\n\n"
            if "Any" in signature
            else ("from typing import List\n\n\n")
        )
    elif rng.random() < 0.1:
        imports = "import math\n\n\n"
    quotes = "'''" if rng.random() < 0.12 else '"""'
    if rng.random() < 0.3:
        name = _pick(rng, _VERBS) if rng.random() < 0.5 else _pick(rng, _NOUNS)
    lead = _pick(rng, (" ", "\n    ", ""))
    words = (
        "Given",
        "Return",
        "Check",
        "Find",
        "Write a function",
        "You are given",
        "Create",
        "Input to this function",
        "This function",
        "For a given",
        "The",
        "A",
        "",
        "",
        "",
    )
    return f"{imports}def {name}{signature}:\n    {quotes}{lead}{_pick(rng, words)}".rstrip(" ")


def _code(rng: np.random.Generator) -> Seed:
    kind = rng.random()
    if kind < 0.6:
        return Seed(_function_head(rng), "code", 200, 1)
    if kind < 0.7:
        ask = _pick(
            rng,
            (
                "Complete this Python function:",
                "Complete the following code:",
                "Finish this function.",
                "Implement this:",
            ),
        )
        return Seed(f"{ask}\n\n{_function_head(rng)}", "code", 200, 1)
    return Seed(_pick(rng, _CODE_STARTS), "code", 110)


_NAMES = tuple(
    """Tom Anna Maria Ben Lucy Sam Emma Jack Olivia Liam Noah Mia Zoe Paul Nina Carlos Aisha Ravi
    Mei Ahmed Kate Peter Julia Mark Sarah David Laura James Rosa Kevin Grace Oscar Leo Ivy Hannah
    Jim Mary John Alice Bob Tina Greg Sofia Dan Ella Fred Gina Henry Irene""".split()
)
_THINGS = tuple(
    """apples books pencils marbles cookies stickers oranges balloons cards toys flowers bottles
    eggs cupcakes tickets boxes shirts candies coins stamps chairs trees fish chickens
    bags""".split()
)
_PLACES = (
    "A store",
    "A bakery",
    "A farmer",
    "A school",
    "A train",
    "A factory",
    "A library",
    "A car",
    "A shop",
    "A restaurant",
    "A company",
    "A class",
    "A teacher",
    "A garden",
    "A tank",
    "A box",
    "A company",
    "The school",
    "A group of friends",
    "A family",
)
_MATH_STARTS = tuple(
    """Solve this problem: A|Solve this word problem:|Solve for x:|Calculate|What is the value of|
    Find the|If a|If|How many|A rectangle has|The sum of|The price of|There are|In a class of|
    The ratio of|Two trains|A number|What is|Simplify|Evaluate the expression|Each|Every day|
    Half of|The perimeter of|The average of|Three friends""".split("|")
)
_MATH_STARTS = tuple(start.strip() for start in _MATH_STARTS)
_STORIES = (
    "{name} has {n} {things}.",
    "{name} has {n}",
    "{name} bought {n} {things} for ${m} each.",
    "{name} buys {n} {things}",
    "{name} and {other} have",
    "{name} and {other} are",
    "{name} is {n} years old.",
    "{name} earns ${n} an hour",
    "{name} works {m} hours a day",
    "{name} reads {n} pages",
    "{name} runs {m} miles",
    "{name} makes {n} {things} every day.",
    "{name} sold {n} {things}",
    "{name} wants to buy",
    "{name} went to the store",
    "{name} is saving",
    "{name} needs {n} {things}",
    "{name} gave {m} {things} to {other}",
    "{name}'s",
    "{name} can",
    "{name} spent ${n}",
    "{name} drove {n} miles",
    "{name} has twice as many {things} as {other}.",
    "{place} has {n} {things}.",
    "{place} sells {things} for ${m} each.",
    "{place} sold {n} {things}",
    "{place}",
    "There are {n} {things} in",
    "A box of {n} {things} costs ${m}.",
    "If {name} has {n} {things} and",
    "It takes {name} {m} hours to",
    "Every week, {name}",
    "In {m} days, {name}",
)


_PROBLEMS = (
    "{name} has {n} {things}. {other} gives {name} {m} more {things}, and then {name} loses {k} of "
    "them. How many {things} does {name} have now?",
    "{name} buys {m} boxes of {things}. Each box holds {n} {things} and costs ${k}. How much does "
    "{name} pay in total?",
    "{place} sold {n} {things} on Monday and twice as many on Tuesday. On Wednesday it sold {m} "
    "fewer than on Tuesday. How many {things} were sold in all three days?",
    "{name} works {m} hours a day, {k} days a week, and earns ${n} an hour. How much money does "
    "{name} earn in {m} weeks?",
    "{name} is {k} years older than {other}. In {m} years {name} will be twice as old as {other} "
    "is now. How old is {other}?",
    "A train travels at {n} miles per hour for {m} hours and then at half that speed for {k} "
    "hours. How far does it travel?",
    "{name} reads {m} pages in the morning and {k} pages in the evening. The book has {n} pages. "
    "How many days does {name} need to finish it?",
    "There are {n} students in a class. {m} of them play football and {k} play tennis. If {k} "
    "students play both, how many play neither?",
    "{name} spends a third of ${n} on {things} and ${m} on lunch. How much money is left?",
    "{name} bakes {n} {things} and shares them equally with {m} friends. How many {things} does "
    "each person get, and how many are left over?",
    "The price of a ticket is ${m}. Children pay half. How much does a family of {k} adults and "
    "{m} children pay for tickets?",
    "{name} has {k} times as many {things} as {other}. Together they have {n} {things}. How "
    "many {things} does {other} have?",
)


def _math(rng: np.random.Generator) -> Seed:
    kind = rng.random()
    if kind < 0.2:
        return Seed(_pick(rng, _MATH_STARTS), "math", 120)
    first, second = rng.choice(len(_NAMES), 2, replace=False)
    text = _pick(rng, _PROBLEMS if kind < 0.6 else _STORIES).format(
        name=_NAMES[first], other=_NAMES[second], things=_pick(rng, _THINGS),
        place=_pick(rng, _PLACES), n=int(rng.integers(12, 300)), m=int(rng.integers(2, 25)),
        k=int(rng.integers(2, 10)),
    )  # fmt: skip
    if kind < 0.6:  # the problem up to some word; the target makes up the rest
        words = text.split(" ")
        text = " ".join(words[: int(rng.integers(len(words) // 3, len(words) + 1))])
    return Seed(text, "math", 100)
