//! Copies runs of words.

use cubecl::prelude::*;

/// Words of a run that one cube copies.
pub(crate) const RUN: usize = 4096;

/// `runs` is `[n, 3]`: first word of the source, of the target, number of words. The target is disjoint
/// from every source. One cube for each run.
#[cube(launch_unchecked)]
pub(crate) fn copy_between(from: &Array<u32>, to: &mut Array<u32>, runs: &Array<u32>, count: u32) {
    let run = CUBE_POS;
    if run < count as usize {
        let source = runs[3 * run] as usize;
        let target = runs[3 * run + 1] as usize;
        let words = runs[3 * run + 2] as usize;
        let mut i = UNIT_POS as usize;
        while i < words {
            to[target + i] = from[source + i];
            i += CUBE_DIM as usize;
        }
    }
}

/// Likewise within one arena.
#[cube(launch_unchecked)]
pub(crate) fn copy_within(arena: &mut Array<u32>, runs: &Array<u32>, count: u32) {
    let run = CUBE_POS;
    if run < count as usize {
        let source = runs[3 * run] as usize;
        let target = runs[3 * run + 1] as usize;
        let words = runs[3 * run + 2] as usize;
        let mut i = UNIT_POS as usize;
        while i < words {
            arena[target + i] = arena[source + i];
            i += CUBE_DIM as usize;
        }
    }
}
