"""`manyhands race script.py PLAN PLAN ... --target accuracy=0.88`: which plan is there first.

    command.py     runs every plan with every seed
    request.py     what is raced: `race.json`
    race_plans.py  the plans, parsed and labelled
    ddp.py         torch's DistributedDataParallel as one of the plans
    report.py      table, picture, page and numbers

A race directory holds `race.json`, a folder for each plan and in it a run directory for each seed,
then the picture, the page and the numbers. A resumed race keeps the runs that have ended and starts
the interrupted one anew: an interrupted time is no time to accuracy.
"""
