from tests.serving.decision_parts import either_way as either_way
