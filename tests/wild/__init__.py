from tests.wild.operators import declare_operators

declare_operators()  # before anything imports torchvision, as transformers does
