"""Define every knob of a run (`schema`), and load recipes into them (`load`)."""
