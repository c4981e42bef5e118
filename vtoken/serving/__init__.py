"""Serving on Ray Serve: ingress, engine replicas, controller, router.

Only this package imports Ray, and it knows the engine by the name in `settings.engine_service` only.
"""
