"""The reader of final schedules, on schedules written by hand."""

import pytest

from kernels.expert_histogram.static_time import ScheduleError, read_schedule

NESTED = """\
LB: loop body
     0   :  { %7 = vsyncpa [#allocation3], 0 }
   0x1   :  { %8 = nop }
   0x2 LB: > { %9 = sphi } /* Start region 3 :: Start region 4 */
   0x3   : > { %10 = vadd.s32 }
   0x4 LB: >> { %11 = sphi
 continued */ } /* Start region 9 */
   0x5   : >> { %12 = sbr.rel (!%p1) target = $region9 }
   0x6   : >> { %13 = nop }
   0x7   : >> { %14 = nop }
   0x8   : >> { %15 = nop }
   0x9   : >> { %16 = nop }
   0xa   : > { %17 = sbr.rel (%p2) target = $region8 } /* a branch forward */
   0xb   :  { %18 = nop }
   0xc   : > { %19 = sbr.rel (!%p3) target = $region3 }
   0xd   : > { %20 = nop }
   0xe   : > { %21 = nop }
   0xf   : > { %22 = nop }
  0x10   : > { %23 = nop } /* End region 3 */
  0x11   :  { %24 = nop }
"""


def test_loops_end_behind_the_delay_of_their_branch():
    schedule = read_schedule(NESTED)
    assert schedule.num_bundles == 18
    assert schedule.loops == ((2, 16), (4, 9))
    assert schedule.own_bundles() == (3, (9, 6))


def test_cycles_weigh_loops_by_their_trips():
    assert read_schedule(NESTED).cycles([10, 40]) == 3 + 10 * 9 + 40 * 6


def test_a_loop_of_one_bundle_and_its_neighbour():
    text = """\
   0x0 LB: > { %1 = sbr.rel (!%p1) target = $region1 } /* Start region 1 */
   0x1   : > { %2 = nop }
   0x2   : > { %3 = nop }
   0x3   : > { %4 = nop }
   0x4   : > { %5 = nop }
   0x5 LB: > { %6 = sbr.rel (!%p1) target = $region2 } /* Start region 2 */
   0x6   : > { %7 = nop }
"""
    schedule = read_schedule(text)
    assert schedule.loops == ((0, 4), (5, 6))
    assert schedule.own_bundles() == (0, (5, 2))


def test_another_number_of_loops_is_an_error():
    with pytest.raises(ScheduleError, match="has 2 loops, the kernel 3"):
        read_schedule(NESTED).cycles([1, 1, 1])


def test_a_loop_without_end_is_an_error():
    with pytest.raises(ScheduleError, match="the loop at bundle 0 has no end"):
        read_schedule("   0x2 LB: > { %9 = sphi } /* Start region 3 */")


def test_no_bundle_is_an_error():
    with pytest.raises(ScheduleError, match="no bundle"):
        read_schedule("LB: loop body\n")
