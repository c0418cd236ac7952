"""Defines every knob of a run (`schema`), and loads recipes into these knobs (`load`)."""
