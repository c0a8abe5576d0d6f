"""Reference-model workers behind the real VllmEngine service, on this machine's own cores.

Read worker.py first: it puts together one worker. engine.py holds a worker's state and its step
thread, scheduler.py says what a step runs, servicer.py and kv_transfer.py are its doors.
"""
