//! A rectangle of a row-major matrix, to be filled by several threads.

use std::marker::PhantomData;

/// Exclusive access to some rows and columns of a matrix. Cutting it gives rectangles that do not
/// overlap, each of which can go to another thread.
pub(crate) struct Rectangle<'a> {
    first: *mut f32,
    stride: usize,
    rows: usize,
    width: usize,
    matrix: PhantomData<&'a mut [f32]>,
}

// SAFETY: a rectangle is a set of disjoint `&mut [f32]`, one per row, which are `Send`.
unsafe impl Send for Rectangle<'_> {}

impl<'a> Rectangle<'a> {
    /// All of a matrix of rows of `width` elements; elements beyond the last whole row are left out.
    pub(crate) fn new(matrix: &'a mut [f32], width: usize) -> Self {
        Self {
            first: matrix.as_mut_ptr(),
            stride: width,
            rows: matrix.len().checked_div(width).unwrap_or(0),
            width,
            matrix: PhantomData,
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// The part of row `row` inside the rectangle, `[width]`.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: rows below `rows` and columns below `width` lie inside the borrowed matrix, and no
        // other rectangle covers them; `&mut self` keeps two rows from being borrowed at once.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(row * self.stride), self.width) }
    }

    /// The same rectangle for a shorter while.
    pub(crate) fn reborrow(&mut self) -> Rectangle<'_> {
        Rectangle { matrix: PhantomData, ..*self }
    }

    /// The rows before `at`, and the rest; an `at` beyond the end leaves nothing for the rest.
    pub(crate) fn split_rows(self, at: usize) -> (Self, Self) {
        let at = at.min(self.rows);
        let rest = if at < self.rows {
            // SAFETY: row `at` lies inside the matrix.
            unsafe { self.first.add(at * self.stride) }
        } else {
            self.first
        };
        let rows = self.rows - at;
        (Self { rows: at, ..self }, Self { first: rest, rows, ..self })
    }

    /// The columns before `at`, and the rest; an `at` beyond the end leaves nothing for the rest.
    pub(crate) fn split_columns(self, at: usize) -> (Self, Self) {
        let at = at.min(self.width);
        // SAFETY: at most one past the part of the first row, or the pointer itself if there is none.
        let rest = unsafe { self.first.add(if self.rows > 0 { at } else { 0 }) };
        let width = self.width - at;
        (Self { width: at, ..self }, Self { first: rest, width, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cuts in all ways, then adds 1 to every element of every piece.
    fn increment(mut part: Rectangle<'_>, depth: usize) {
        if depth == 0 {
            for row in 0..part.rows() {
                part.row(row).iter_mut().for_each(|x| *x += 1.0);
            }
        } else if depth.is_multiple_of(2) {
            let (a, b) = part.split_rows(depth / 2);
            increment(a, depth - 1);
            increment(b, depth - 1);
        } else {
            let (a, b) = part.split_columns(depth);
            increment(a, depth - 1);
            increment(b, depth - 1);
        }
    }

    #[test]
    fn pieces_cover_every_element_once() {
        for (rows, width) in [(0, 0), (0, 5), (1, 1), (1, 40), (7, 3), (40, 17)] {
            for depth in 0..8 {
                let mut matrix = vec![0.0; rows * width];
                increment(Rectangle::new(&mut matrix, width), depth);
                assert_eq!(matrix, vec![1.0; rows * width], "{rows}x{width}, {depth} cuts deep");
            }
        }
    }
}
