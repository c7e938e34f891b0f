# %% [markdown]
"""Counting people with an interval, on synthetic scenes, with the network and the calibration that come with latedrop.

The network turns a picture into a density of people; its sum is the count. The interval says how far the count may be
off, and the map of standard deviations where in the picture it is unsure.
"""

# %%
from pathlib import Path

from latedrop_crowd import count_people, draw_panel, load_calibration, load_weights, make_scenes, shipped

# %%
trained = load_weights(shipped("scenes"))
calibration = load_calibration(shipped("scenes", ".calibration.json"), trained)
scenes = make_scenes(train=0, validation=0, test=6)

# %%
frames = [(scenes.frames[i].name, scenes.image(i)) for i in scenes.test]
rows = list(count_people(trained, calibration, frames, level=0.9))
for row, i in zip(rows, scenes.test, strict=True):
    print(f"{row.name}: {row.count:.1f} people, between {row.low:.1f} and {row.high:.1f}; truly {scenes.count(i)}")
held = [row.low <= scenes.count(i) <= row.high for row, i in zip(rows, scenes.test, strict=True)]
print(f"the 90 % interval holds {sum(held)} of {len(held)} scenes")

# %% [markdown]
# What to see: the density is high on heads, and so is its standard deviation. Rings are annotated heads. Outlined
# regions are faint or rejected: the network may see people there who are none.

# %%
fullest = max(range(len(rows)), key=lambda k: rows[k].count)
figure = draw_panel(rows[fullest], heads=scenes.frames[scenes.test[fullest]].points)
Path("output").mkdir(exist_ok=True)
figure.savefig("output/count_people.png", dpi=120)
