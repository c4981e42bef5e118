"""Game-day drills: `vtoken drill NAME` injects one fault into a fleet under load, watches, and judges.

A drill is one line in `command.DRILLS` and a module with

    run(world: World, quick: bool) -> Outcome
    SETTINGS: Mapping[str, Any]      optional: what the deployment's settings must be, on top of `world.deployment`
    prepare()                        optional: called before a fleet of its own starts
    OWN_FLEET: bool                  optional: True if the drill reaches into processes, which needs a fleet of its own

Every drill ends with one line of JSON (`vtoken.results.outcome`); the exit status is 0 only if it passes.
"""
