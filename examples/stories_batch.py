"""Up to 256 stories at once: every matrix product of a step is one call of the Edge TPU for all of them.

MOCKCORAL=1 DEV=CORAL python examples/stories_batch.py --batch 256
"""

from __future__ import annotations

import time
from statistics import median

from stories import arguments, console, figures, opened

from coral.llm.story import Sampling, Stories

WHO = ["a girl", "a boy", "a cat", "a dog", "a bird", "a fish", "a bear", "a frog"]
NAMES = ["Lily", "Tom", "Max", "Mia", "Ben", "Sue", "Tim", "Amy", "Sam", "Lucy", "Jack", "Anna", "Leo", "Bob", "Sara"]
BEGINS = [f"Once upon a time, there was {who} named {name}." for name in NAMES for who in WHO]


def main() -> None:
    """All begin differently and grow in step."""
    parser = arguments("Many stories at once.")
    parser.add_argument("--batch", type=int, default=32, help="1 to 256")
    parser.add_argument("--steps", type=int, default=100, help="words of each at most")
    parser.add_argument("--show", type=int, default=4, help="how many are printed")
    options = parser.parse_args()
    model, engine = opened(options, options.batch)
    begins = [BEGINS[k % len(BEGINS)] for k in range(options.batch)]
    how = Sampling(options.temperature, options.top_p, options.seed, options.steps)
    prompts = [model.tokenizer.encode(text) for text in begins]
    stories = Stories(engine.session(options.batch), model.tokenizer, prompts, how, engine.config.context)
    before, spent, grown = engine.usage(), [], list(begins)
    with console.status("") as status:
        while not stories.done:
            begin = time.perf_counter()
            for row, text in stories.advance():
                grown[row] += text
            spent.append(time.perf_counter() - begin)
            status.update(grown[0][-console.width + 10 :].replace("\n", " "))
    for text in grown[: options.show]:
        console.print(text, markup=False)
        console.print()
    words = sum(len(row.ids) - row.prompt for row in stories.rows)
    figures(engine, engine.usage().since(before), words, len(spent), sum(spent))
    rate = options.batch / median(spent)
    console.print(f"median step {1e3 * median(spent):,.1f} ms: {rate:,.0f} words per second with every row writing")


if __name__ == "__main__":
    main()
