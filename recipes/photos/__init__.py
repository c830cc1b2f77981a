"""The recipe of a class-conditional model of photographs, for any folder of class folders: training and FID."""
