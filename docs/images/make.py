"""Make the pictures of the docs: run the commands that they show, and photograph the pages in headless Chromium.

    python docs/images/make.py                    every picture, beside this file
    python docs/images/make.py plan averaging     some of them
    python docs/images/make.py look PAGE OUT.png --width 390 --dark
                                                  any page, as a phone shows it at night

A picture is a page with all but some cards hidden. `large-batch.png` is no page: it is drawn from the figures of
`make bench ARGS=large-batch`. What plan.png shows was measured, so it differs from machine to machine.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--virtual-time-budget=20000",
)
# In a copy of the page: hides what a picture does not show, and tells the frame around it how high the rest is.
SCRIPT = """<script>
const kept = KEPT;
if (kept) {
  const style = document.createElement("style");
  const alone = "main { padding: 0 } .charts { margin: 0 }";
  style.textContent = kept.includes("header") ? "main { padding: 28px 20px 4px }" : alone;
  document.head.append(style);
  const has = (part) => part.matches(kept) || part.querySelector(kept);
  const parts = [...document.querySelectorAll("main > *, .charts > *")];
  for (const part of parts) if (!has(part)) part.style.display = "none";
}
addEventListener("load", () => setInterval(() => {
  parent.postMessage(Math.ceil(document.querySelector("main").getBoundingClientRect().bottom), "*");
}, 500));
</script>"""
FRAME = """<!doctype html><style>body { margin: 0 } iframe { border: 0; width: WIDTHpx; height: HEIGHTpx }</style>
<body><script>addEventListener("message", (event) => document.documentElement.dataset.height = event.data)</script>
<iframe src="page.html"></iframe>"""


def photograph(
    page: Path, out: Path, *, width: int, kept: str = "", most_height: int = 12_000, dark: bool = False
) -> None:
    """Write a picture of a page, or of those of its cards that match the selector `kept`."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("no chromium, chromium-browser or google-chrome on the path")
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)  # it would stop our script as well
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder, "frame.html")
        Path(folder, "page.html").write_text(
            text.replace("</body>", SCRIPT.replace("KEPT", json.dumps(kept)) + "</body>")
        )

        def opened(height: int, *options: str) -> str:
            frame.write_text(FRAME.replace("WIDTH", str(width)).replace("HEIGHT", str(height)))
            scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
            command = [browser, *FLAGS, scheme, f"--user-data-dir={folder}/profile", *options, frame.as_uri()]
            return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout

        found = re.search(r'data-height="(\d+)"', opened(1000, "--dump-dom"))
        if not found:
            sys.exit(f"{page} was not drawn")
        height = min(int(found[1]), most_height)
        opened(height, f"--window-size={width},{height}", f"--screenshot={out.resolve()}")


def command(folder: Path, *arguments: str) -> Path:
    """Run paceline and return the page that it leaves in a folder."""
    subprocess.run([sys.executable, "-m", "paceline", *arguments, "--out", str(folder)], check=True)
    return next(page for name in ("report.html", "inspect.html") if (page := folder / name).is_file())


def race(folder: Path) -> Path:
    return command(folder, "race")


def own_race(folder: Path) -> Path:
    script = HERE.parents[1] / "examples" / "own_data_race.py"
    subprocess.run([sys.executable, str(script), "--out", str(folder)], check=True)
    return folder / "report.html"


def averaging_race(folder: Path) -> Path:
    slow = ("--delay", "slow-worker", "--delay.slow-factor", "3", "--network.worker-bits-per-second", "1e7")
    workers = ("--strategies", "ssgd,local-sgd,hpsgd", "--workers", "4", "--split", "iid", "--rounds", "100")
    return command(folder, "race", *workers, *slow)


def mixed_race(folder: Path) -> Path:
    recipe = HERE.parents[1] / "examples" / "mixed.toml"
    return command(folder, "race", str(recipe), "--strategies", "ssgd,lgc@ranks,hpsgd")


def plan(folder: Path) -> Path:
    recipe = folder.with_suffix(".toml")
    recipe.write_text(
        '[data]\nname = "synthetic"\nchannels = 3\nsize = 32\n[model]\nname = "resnet18"\n[worker]\nbatch_size = 64\n'
    )
    cut = ("--stages", "4", "--microbatches", "8", "--bandwidth", "1Gbit/s", "--memory", "500MB")
    return command(folder, "plan", "pipeline", str(recipe), *cut)


def rates(folder: Path) -> Path:
    recipe = folder.with_suffix(".toml")
    recipe.write_text(
        '[data]\nname = "synthetic"\nchannels = 3\nsize = 32\n[model]\nname = "alexnet"\n'
        '[optimizer]\nname = "lars"\nlr = 4.0\n'
    )
    return command(folder, "inspect", "rates", str(recipe), "--steps", "10")


def wrong_labels(folder: Path) -> Path:
    """Train on digits with 45 of the 1,500 labels changed on purpose, and inspect who was pruned."""
    import torch

    import paceline
    from paceline.data import load_dataset
    from paceline.models import build_model

    torch.manual_seed(0)
    folder.mkdir()
    data = load_dataset("digits")
    inputs, targets = data.train.inputs, data.train.targets.clone()
    changed = torch.randperm(len(targets))[:45]
    targets[changed] = (targets[changed] + 1 + torch.randint(9, (45,))) % 10
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    model = build_model("lenet", input_shape=inputs.shape[1:], classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    pruning = paceline.FinePruning(
        len(dataset), batch_size=32, window=10, starting_point=4, block=4, count=2, prune=0.2, seed=0
    )
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=pruning)
    for _ in range(20):
        for x, y in loader:
            losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
            optimizer.zero_grad()
            pruning.observe(losses).backward()
            optimizer.step()
    title = "paceline: digits, 45 of 1,500 labels changed on purpose"
    page: Path = paceline.pruning_page(pruning, dataset, folder / "pruning.html", model=model, title=title)
    return page


@dataclass(frozen=True)
class Picture:
    """A picture: how its page is made, and which part of it is shown."""

    make: Callable[[Path], Path]
    kept: str = ""
    width: int = 1100
    most_height: int = 12_000


PICTURES = {
    "timeline": Picture(race, kept="#title-timeline"),
    "own-race": Picture(own_race, kept="#title-timeline"),
    "averaging": Picture(averaging_race, kept="#title-timeline"),
    "mixed-machines": Picture(mixed_race, kept="#title-timeline"),
    "plan": Picture(plan, kept="header, .tiles, .stages, .schedules, #title-steps, #title-layers"),
    "inspect": Picture(rates, kept="header, #title-ratios"),
    "inspect-pruning": Picture(wrong_labels, most_height=1240),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=f"look PAGE OUT.png, or some of {', '.join(PICTURES)}")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    if given.what[:1] == ["look"]:
        photograph(Path(given.what[1]), Path(given.what[2]), width=given.width, dark=given.dark)
        return
    for name in given.what or PICTURES:
        picture = PICTURES[name]
        with tempfile.TemporaryDirectory() as folder:
            page = picture.make(Path(folder, name))
            out = HERE / f"{name}.png"
            photograph(page, out, width=picture.width, kept=picture.kept, most_height=picture.most_height)
        print(out)


if __name__ == "__main__":
    main()
