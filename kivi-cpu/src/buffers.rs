//! Recycled memory: a decoder asks for the same few buffers at every token.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Elements that are kept for later, at most: 16 MiB. What a long prompt needed beyond that goes back
/// to the allocator.
const KEPT_ELEMENTS: usize = 1 << 22;

/// Buffers that are not in use.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<Vec<Vec<f32>>>);

impl Buffers {
    /// A buffer of `len` elements of any value: the smallest that is large enough, or a new one.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Buffer {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = kept.iter().enumerate().filter(|(_, buffer)| buffer.len() >= len);
        let best = fits.min_by_key(|(_, buffer)| buffer.len()).map(|(index, _)| index);
        let floats = best.map(|index| kept.swap_remove(index));
        drop(kept);
        let floats = floats.unwrap_or_else(|| vec![0.0; len]);
        Buffer { floats, len, home: Some(Arc::clone(self)) }
    }

    fn give_back(&self, floats: Vec<f32>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let elements: usize = kept.iter().map(Vec::len).sum();
        if !floats.is_empty() && elements + floats.len() <= KEPT_ELEMENTS {
            kept.push(floats);
        }
    }
}

/// A slice of f32 that goes back to where it came from.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// At least as long as the slice, so that nothing is cleared when a longer one is asked for.
    floats: Vec<f32>,
    len: usize,
    home: Option<Arc<Buffers>>,
}

impl Buffer {
    /// A slice of nothing.
    pub(crate) const EMPTY: Self = Self { floats: Vec::new(), len: 0, home: None };
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(home) = &self.home {
            home.give_back(std::mem::take(&mut self.floats));
        }
    }
}

impl From<Vec<f32>> for Buffer {
    fn from(floats: Vec<f32>) -> Self {
        Self { len: floats.len(), floats, home: None }
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        let Some(home) = &self.home else { return self.to_vec().into() };
        let mut copy = home.take(self.len());
        copy.copy_from_slice(self);
        copy
    }
}

impl PartialEq for Buffer {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.floats[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.floats[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_that_fits_comes_back() {
        let buffers = Arc::new(Buffers::default());
        let addresses = [100, 10, 1000].map(|len| buffers.take(len)).map(|b| b.as_ptr());
        let again = [5, 50, 500].map(|len| buffers.take(len));
        let [a, b, c] = again.each_ref().map(|buffer| buffer.as_ptr());
        assert_eq!([b, a, c], addresses);
        assert_eq!(again.map(|buffer| buffer.len()), [5, 50, 500]);
    }

    #[test]
    fn what_is_kept_has_a_limit() {
        let buffers = Arc::new(Buffers::default());
        drop(buffers.take(KEPT_ELEMENTS + 1));
        assert!(buffers.0.lock().unwrap().is_empty());
        drop([buffers.take(KEPT_ELEMENTS / 2), buffers.take(KEPT_ELEMENTS)]);
        assert_eq!(buffers.0.lock().unwrap().len(), 1);
    }
}
