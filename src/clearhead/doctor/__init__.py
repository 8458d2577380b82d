"""The doctor: is somebody's attention right, and if not, which mistake is it?"""

from clearhead.doctor.checking import check
from clearhead.doctor.report import Report

__all__ = ["Report", "check"]
