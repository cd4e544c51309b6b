//! A bitmap to draw on, with a font of its own: no font of the system is needed.

use anyhow::Result;
use plotters_backend::{
    BackendColor, BackendCoord, BackendTextStyle, DrawingBackend, DrawingErrorKind, FontTransform,
    text_anchor::{HPos, VPos},
};
use std::convert::Infallible;

/// Pixels of a character of `font8x8`, in both directions.
const GLYPH: i32 = 8;

/// An RGB image, white at first.
pub(super) struct Raster {
    size: (u32, u32),
    /// `[height, width, 3]`.
    pixels: Vec<u8>,
}

impl Raster {
    pub(super) fn new(size: (u32, u32)) -> Self {
        Self { size, pixels: vec![255; 3 * size.0 as usize * size.1 as usize] }
    }

    /// The image as a PNG file.
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.size.0, self.size.1);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&self.pixels)?;
        writer.finish()?;
        Ok(bytes)
    }

    fn put(&mut self, (x, y): (i32, i32), color: BackendColor) {
        let inside = |at: i32, size: u32| usize::try_from(at).ok().filter(|&at| at < size as usize);
        let (Some(x), Some(y)) = (inside(x, self.size.0), inside(y, self.size.1)) else { return };
        let start = 3 * (y * self.size.0 as usize + x);
        let (r, g, b) = color.rgb;
        for (pixel, channel) in self.pixels[start..start + 3].iter_mut().zip([r, g, b]) {
            let mixed = f64::from(*pixel) * (1.0 - color.alpha) + f64::from(channel) * color.alpha;
            *pixel = mixed.round() as u8;
        }
    }
}

type Drawn = Result<(), DrawingErrorKind<Infallible>>;

impl DrawingBackend for &mut Raster {
    type ErrorType = Infallible;

    fn get_size(&self) -> (u32, u32) {
        self.size
    }

    fn ensure_prepared(&mut self) -> Drawn {
        Ok(())
    }

    fn present(&mut self) -> Drawn {
        Ok(())
    }

    fn draw_pixel(&mut self, point: BackendCoord, color: BackendColor) -> Drawn {
        self.put(point, color);
        Ok(())
    }

    /// Characters of 8 by 8 pixels, twice as large for headings; what the font lacks is left blank.
    fn draw_text<S: BackendTextStyle>(
        &mut self,
        text: &str,
        style: &S,
        position: BackendCoord,
    ) -> Drawn {
        let factor = factor(style.size());
        let (width, height) = (GLYPH * factor * text.chars().count() as i32, GLYPH * factor);
        let anchor = style.anchor();
        let dx = match anchor.h_pos {
            HPos::Left => 0,
            HPos::Center => -width / 2,
            HPos::Right => -width,
        };
        let dy = match anchor.v_pos {
            VPos::Top => 0,
            VPos::Center => -height / 2,
            VPos::Bottom => -height,
        };
        let turn = style.transform();
        let color = BackendColor { alpha: 1.0, ..style.color() };
        for (index, character) in text.chars().enumerate() {
            let Some(glyph) = font8x8::legacy::BASIC_LEGACY.get(character as usize) else {
                continue;
            };
            for (bit, row) in (0..GLYPH).flat_map(|row| (0..GLYPH).map(move |bit| (bit, row))) {
                if glyph[row as usize] >> bit & 1 == 0 {
                    continue;
                }
                for (i, j) in (0..factor).flat_map(|j| (0..factor).map(move |i| (i, j))) {
                    let x = dx + (GLYPH * index as i32 + bit) * factor + i;
                    let y = dy + row * factor + j;
                    let (x, y) = match turn {
                        FontTransform::Rotate270 => (y, -x),
                        FontTransform::Rotate90 => (-y, x),
                        FontTransform::Rotate180 => (-x, -y),
                        FontTransform::None => (x, y),
                    };
                    self.put((position.0 + x, position.1 + y), color);
                }
            }
        }
        Ok(())
    }

    fn estimate_text_size<S: BackendTextStyle>(
        &self,
        text: &str,
        style: &S,
    ) -> Result<(u32, u32), DrawingErrorKind<Infallible>> {
        let pixels = (GLYPH * factor(style.size())) as u32;
        Ok((pixels * text.chars().count() as u32, pixels))
    }
}

/// How many times larger than 8 pixels a font of some size is drawn.
fn factor(size: f64) -> i32 {
    if size >= 22.0 { 2 } else { 1 }
}
