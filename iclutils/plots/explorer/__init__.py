"""Explorers: pictures of attention and of information flow that answer to the reader's hand.

Like figures they draw arrays and never see a model. What they draw is a Vega-Lite specification
(Satyanarayan et al. 2017): data and rules, no program of ours. JupyterLab, VS Code and Colab draw
it, and so do the pages of this book, from disk; where nothing draws, the still picture beside it
shows its first state. Only weights that can be told apart on a screen are kept, so that an
explorer stays small: three decimals, and of a flow the strongest edges of every layer.
"""

from ._parts import MIME as MIME
from ._parts import Explorer as Explorer
from .heads import attention as attention
from .streams import flow as flow
