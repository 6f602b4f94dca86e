"""Integrations with frameworks: finding experts and routers, recording and replaying routing. One per framework."""
