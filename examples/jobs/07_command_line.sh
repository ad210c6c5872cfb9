#!/bin/sh
# 7. The command line: a model of your own and a CSV file, from the fit to the page.
# Run in a copy of examples/own_model.
set -e
python model.py    # trains; writes weights.safetensors and the tables
W="--weights weights.safetensors"
scod fit model.py:net train.csv -o monitor.scod $W --likelihood gaussian --variance 0.3
scod calibrate monitor.scod model.py:net heldout.csv $W
scod score monitor.scod model.py:net new.csv $W
scod explain monitor.scod model.py:net new.csv $W --top 1 --references train.csv --plot why.png
scod inspect monitor.scod
scod report monitor.scod model.py:net $W --known test.csv --unknown slips.csv -o report.html
