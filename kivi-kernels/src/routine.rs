//! Which kernel, and in which form, computes the attention of a problem on a device.

use crate::{
    AttendConfig, Shape, Unpack,
    kernels::splits::{self, SplitConfig},
};
use kivi_core::{Error, Result};

/// Properties of a device that matter for the choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of shared memory of a cube.
    pub shared_memory: usize,
    /// Units of a cube.
    pub units: usize,
    /// Units of a plane whose operations may be used.
    pub plane: Option<usize>,
    /// Whether denormal numbers are kept, not flushed to 0.
    pub denormals: bool,
    /// Whether the device is the processor.
    pub software: bool,
    /// Queries of a cube, if not as many as there are.
    pub queries: Option<usize>,
    /// Whether a word can be read as a pair of f16, denormal ones too.
    pub pairs: bool,
    /// Whether there are matrix units for products of 16 × 8 × 16 of f16 with sums in f32.
    pub matrix: bool,
    /// The routine, if it is not to be chosen.
    pub routine: Option<Routine>,
}

/// How attention over codes is computed. What a routine cannot do, and everything in full precision, is
/// done by [`Routine::Shared`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Routine {
    /// f32 and shared memory: runs everywhere.
    Shared,
    /// Pairs of halves on planes of 32, for 1 or 2 query heads of a kv head.
    Plane,
    /// Matrix units, for up to 8 query heads of a kv head.
    Matrix,
}

/// One attention of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Sizes of the layer.
    pub shape: Shape,
    /// Query heads of a kv head.
    pub head_group: usize,
    /// The most rows of one sequence.
    pub rows: usize,
    /// Whether logits are soft-capped.
    pub softcap: bool,
    /// Whether there are ALiBi slopes.
    pub slopes: bool,
}

/// Tokens of a split: fixed, so that results do not depend on how many there are.
const SPLIT: usize = 256;

/// Queries that share the unpacking of a split.
const MAX_QUERIES: usize = 8;

/// Tokens of a split of [`Routine::Plane`] and [`Routine::Matrix`].
const CODE_SPLIT: usize = 512;

impl Problem {
    /// The routine for the codes of a step, with what it is compiled for; `None` for
    /// [`Routine::Shared`].
    pub fn of_codes(&self, limits: Limits) -> Option<SplitConfig> {
        let shape = self.shape;
        // One row of each sequence: its heads are the rows of the routine. A GPU without denormals or
        // other planes, promoted channels and slopes are left to the general routine.
        let fits = limits.plane == Some(32) && limits.pairs && limits.denormals;
        let plain = shape.promoted == 0 && !self.slopes && self.rows == 1;
        if !fits || !plain || self.head_group > 8 {
            return None;
        }
        let config = |routine, rows| SplitConfig {
            routine,
            rows,
            key_bits: shape.key_bits,
            value_bits: shape.value_bits,
            group_size: shape.group,
            head_dim: shape.head_dim,
            kv_heads: shape.kv_heads,
            page_tokens: shape.page_tokens,
            split_tokens: CODE_SPLIT,
            soft_cap: self.softcap,
        };
        let matrix = config(splits::Routine::Matrix, 8);
        let plane = config(splits::Routine::Plane, self.head_group);
        let possible = |config: &SplitConfig| config.refusal().is_none();
        let matrix = limits.matrix.then_some(matrix).filter(possible);
        let plane = Some(plane).filter(possible);
        match limits.routine {
            Some(Routine::Shared) => None,
            Some(Routine::Plane) => plane,
            Some(Routine::Matrix) => matrix,
            // Beyond one head the units' eight columns cost less than a second pass.
            None if self.head_group == 1 => plane.or(matrix),
            None => matrix.or(plane),
        }
    }

    /// The form of the kernel.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when one query already needs more shared memory than there is.
    pub fn blueprint(&self, backend: &'static str, limits: Limits) -> Result<AttendConfig> {
        let shape = self.shape;
        let largest = 1 << limits.units.max(1).ilog2();
        let units = shape.head_dim.next_power_of_two().clamp(64, 256).max(shape.group).min(largest);
        let queries = limits.queries.unwrap_or(self.rows * self.head_group);
        let queries = queries.clamp(1, MAX_QUERIES).next_power_of_two();
        let plane = limits.plane.filter(|&plane| plane.is_power_of_two() && plane <= units);
        let mut config = AttendConfig {
            shape,
            queries,
            split: SPLIT,
            units,
            plane: plane.unwrap_or(0),
            unroll: !limits.software,
            unpack: if limits.denormals { Unpack::Denormal } else { Unpack::Convert },
            softcap: self.softcap,
            slopes: self.slopes,
        };
        while config.shared_bytes() > limits.shared_memory && config.queries > 1 {
            config.queries /= 2;
        }
        if config.shared_bytes() > limits.shared_memory || units < shape.group {
            let what = format!(
                "head_dim {} in groups of {} with {} bytes of shared memory and {} units in a cube",
                shape.head_dim, shape.group, limits.shared_memory, limits.units
            );
            return Err(Error::Unsupported { backend, what });
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Store;

    fn problem(head_dim: usize, group: usize, head_group: usize, rows: usize) -> Problem {
        let shape = Shape {
            kv_heads: 2,
            head_dim,
            group,
            page_tokens: 128,
            sinks: 0,
            key_bits: 2,
            value_bits: 2,
            key_store: Store::F16,
            value_store: Store::F16,
            promoted: 0,
        };
        Problem { shape, head_group, rows, softcap: false, slopes: false }
    }

    const LIMITS: Limits = Limits {
        shared_memory: 32 << 10,
        units: 1024,
        plane: Some(32),
        denormals: true,
        software: false,
        queries: None,
        pairs: true,
        matrix: true,
        routine: None,
    };

    #[test]
    fn the_routine_follows_the_heads_and_the_device() {
        let routine = |head_group, rows, limits| {
            let config = problem(128, 32, head_group, rows).of_codes(limits);
            config.map(|config| (config.routine, config.rows))
        };
        let (plane, matrix) = (splits::Routine::Plane, splits::Routine::Matrix);
        assert_eq!(routine(1, 1, LIMITS), Some((plane, 1)));
        assert_eq!(routine(4, 1, LIMITS), Some((matrix, 8)));
        assert_eq!(routine(9, 1, LIMITS), None);
        assert_eq!(routine(1, 2, LIMITS), None);
        assert_eq!(routine(2, 1, Limits { matrix: false, ..LIMITS }), Some((plane, 2)));
        assert_eq!(routine(4, 1, Limits { matrix: false, ..LIMITS }), None);
        assert_eq!(routine(1, 1, Limits { pairs: false, ..LIMITS }), None);
        assert_eq!(routine(1, 1, Limits { plane: Some(64), ..LIMITS }), None);
        let forced = |routine| Limits { routine: Some(routine), ..LIMITS };
        assert_eq!(routine(1, 1, forced(Routine::Matrix)), Some((matrix, 8)));
        assert_eq!(routine(1, 1, forced(Routine::Shared)), None);
        // A group size and a head_dim the routines do not know.
        assert_eq!(problem(128, 16, 1, 1).of_codes(LIMITS), None);
        assert_eq!(problem(72, 32, 4, 1).of_codes(LIMITS), None);
    }

    #[test]
    fn one_query_takes_a_cube_of_its_own() {
        let config = problem(128, 32, 1, 1).blueprint("test", LIMITS).unwrap();
        assert_eq!((config.queries, config.units, config.plane), (1, 128, 32));
    }

    #[test]
    fn queries_share_a_cube_as_far_as_memory_allows() {
        // 71 heads, or the rows of a draft.
        assert_eq!(problem(64, 32, 71, 1).blueprint("test", LIMITS).unwrap().queries, 8);
        assert_eq!(problem(64, 32, 3, 2).blueprint("test", LIMITS).unwrap().queries, 8);
        assert_eq!(problem(64, 32, 3, 1).blueprint("test", LIMITS).unwrap().queries, 4);
        // 4 queries of 256 channels: 4·(256 + 256 + 256 + 1 + 256 + 8 + 6)·4 bytes.
        let config = problem(256, 32, 8, 1).blueprint("test", LIMITS).unwrap();
        assert_eq!((config.queries, config.shared_bytes()), (4, 4 * 1039 * 4));
    }

    #[test]
    fn a_group_has_a_unit_for_each_token() {
        assert_eq!(problem(64, 128, 1, 1).blueprint("test", LIMITS).unwrap().units, 128);
        let few = Limits { units: 64, ..LIMITS };
        let error = problem(64, 128, 1, 1).blueprint("test", few).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }

    #[test]
    fn codes_are_converted_where_denormals_are_flushed() {
        let unpack = |denormals| {
            problem(64, 32, 1, 1).blueprint("test", Limits { denormals, ..LIMITS }).unwrap().unpack
        };
        assert_eq!([unpack(true), unpack(false)], [Unpack::Denormal, Unpack::Convert]);
    }

    #[test]
    fn planes_are_used_where_they_divide_a_cube() {
        for (plane, used) in [(None, 0), (Some(8), 8), (Some(24), 0), (Some(256), 0)] {
            let config = problem(64, 32, 1, 1).blueprint("test", Limits { plane, ..LIMITS });
            assert_eq!(config.unwrap().plane, used);
        }
    }
}
