"""Reference of all recipe keys, generated from the schema: ``python -m tests.config.reference > docs/recipes.md``."""

from tilth.config.keys import Key, entries_of, keys, sections
from tilth.config.load import SHIPPED, dump_value, names
from tilth.config.schema import DraftConfig, LayoutConfig, LoraConfig, MixtureSource, TeacherConfig

INTRODUCTION = """\
# Recipes

A recipe is a TOML file. It states the keys that differ from the defaults below.

```
tilth run addition-grpo                                        # a recipe that ships with Tilth, by name
tilth run my/recipe.toml                                       # any other, by path
tilth run addition-grpo algorithm.steps=50 run.name=short      # with some keys overridden
```

An override is `section.key=value` with a TOML value; text needs no quotes. An unknown key, a value out of range or two
keys that contradict each other raise an error of one line before anything starts, which says what would work; the exit
code is 2. The run's folder holds the recipe with all its keys as `recipe.toml`, which is a recipe again.
"""

LAYOUTS = """\
Entries of `policy.layout`, `critic.layout`, `reference.layout`, `judge.layout` and `rollout.layout`.
`policy.layout.fsdp=2` sets one entry, `policy.layout={fsdp = 2, tp = 2}` all of them. The sizes of pp, dp, fsdp, ep,
hdp, cp and tp multiply to the workers of the pool. Engines (`rollout`, `judge`) take dp (engines side by side), ep and
tp (each engine over several workers) alone. `tilth layout RECIPE` shows the resulting placement, memory and traffic;
with `--search` it chooses one."""

ADAPTERS = """\
Entries of `policy.lora` and `critic.lora`. `policy.lora.rank=16` freezes the weights of `model.path` and learns a
low-rank change of each matrix (LoRA, arXiv 2106.09685), under any layout; a learning rate ten times that of the
weights is usual. Engines and all readers of the run get merged weights. `tilth export RUN OUT --adapter` writes the
adapters for PEFT; `model.adapter=OUT` begins with them."""

DRAFTS = """\
Entries of `rollout.draft`, where `rollout.speculate` is not off: [more](packages/engines.md#speculation)."""

TEACHERS = """\
Entries of a table of `reference.teachers`, such as `reference.teachers.maths.path`. A prompt follows the teacher of its
source: [more](algorithms.md#several-teachers)."""

MIXTURE = """\
Entries of a table of `[[data.mixture]]`. Which sample stands at a position of a run is a pure function of seed and
position: [more](packages/data.md#mixtures)."""


def reference() -> str:
    """Return all keys as Markdown: name, default, values, meaning."""
    table = keys()
    parts = [INTRODUCTION, f"\nThere are {len(table)} keys. Shipped recipes: {_shipped()}.\n"]
    parts.append(_section("Keys without a section", "", [k for k in table.values() if "." not in k.name]))
    for name, section in sections().items():
        own = [k for k in table.values() if k.name.startswith(f"{name}.")]
        parts.append(_section(f"[{name}]", section.__doc__ or "", own))
    parts.append(_section("Sources of a mixture", MIXTURE, entries_of(MixtureSource)))
    parts.append(_section("Teachers", TEACHERS, entries_of(TeacherConfig)))
    parts.append(_section("Layouts", LAYOUTS, entries_of(LayoutConfig)))
    parts.append(_section("Adapters", ADAPTERS, entries_of(LoraConfig)))
    parts.append(_section("Drafts", DRAFTS, entries_of(DraftConfig)))
    return "\n".join(parts)


def _shipped() -> str:
    return ", ".join(f"[`{name}`](../src/tilth/{SHIPPED.name}/{name}.toml)" for name in names())


def _section(title: str, caption: str, own: list[Key]) -> str:
    rows = [f"| `{k.name}` | `{dump_value(k.field.default)}` | {k.values} | {k.field.description} |" for k in own]
    head = ["| key | default | values | meaning |", "|---|---|---|---|"]
    return "\n".join([f"## {title}", "", *([caption, ""] if caption else []), *head, *rows, ""])


if __name__ == "__main__":
    print(reference(), end="")
