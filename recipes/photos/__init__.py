"""The recipe of a class-conditional model of photographs, for any folder of class folders: training and FID.

May import everything of lantern and nothing of other recipes. Not in the wheel.
"""
