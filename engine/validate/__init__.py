"""Published measurements -> how far Lockstep's predictions of them are off, set by set, beside a one-constant model.

A file goes through these steps, each a file here, each pure: `rows` reads it, `words` says what its texts mean, `case`
makes a row one training in numbers or says why it cannot, `metrics` has what was measured in seconds and bytes,
`spec_of` writes the training as a Spec and a machine, `statistics` compares, `report` puts sets together, `tables`
prints, and `kept` keeps it for a page. Nothing here predicts: that is `engine.predict`, as for everybody.
"""
