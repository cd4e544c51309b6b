//! Plots: a heat map, and curves. SVG or PNG, by the name of the file.

mod raster;

use anyhow::{Result, anyhow, bail};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};
use raster::Raster;
use std::path::Path;

/// Something that can be drawn on any backend.
trait Figure {
    fn draw<DB: DrawingBackend>(
        &self,
        area: &DrawingArea<DB, Shift>,
    ) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>>;
}

/// Formats of the files.
enum Kind {
    Svg,
    Png,
}

impl Kind {
    fn of(path: &Path) -> Result<Self> {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("svg") => Ok(Self::Svg),
            Some("png") => Ok(Self::Png),
            _ => bail!("a plot is an .svg or a .png file, not {}", path.display()),
        }
    }
}

/// Refuses the name of a file that cannot be drawn, before hours of measuring.
pub(super) fn check_name(path: &Path) -> Result<()> {
    Kind::of(path).map(|_| ())
}

/// Writes a figure as SVG or PNG.
fn save(figure: &impl Figure, path: &Path, size: (u32, u32)) -> Result<()> {
    let wrong = |error: String| anyhow!("cannot draw {}: {error}", path.display());
    let bytes = match Kind::of(path)? {
        Kind::Svg => {
            let mut text = String::new();
            {
                let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
                figure.draw(&area).map_err(|error| wrong(error.to_string()))?;
                area.present().map_err(|error| wrong(error.to_string()))?;
            }
            text.into_bytes()
        }
        Kind::Png => {
            let mut raster = Raster::new(size);
            {
                let area = (&mut raster).into_drawing_area();
                figure.draw(&area).map_err(|error| wrong(error.to_string()))?;
            }
            raster.encode()?
        }
    };
    std::fs::write(path, bytes).map_err(|error| anyhow!("cannot write {}: {error}", path.display()))
}

/// Values in rows and columns as colours.
pub(super) struct HeatMap<'a> {
    pub(super) title: &'a str,
    pub(super) x: &'a str,
    pub(super) y: &'a str,
    /// Names of columns and rows; ticks show as many as there is room for.
    pub(super) columns: Vec<String>,
    pub(super) rows: Vec<String>,
    /// `[rows][columns]`; NaN is not drawn.
    pub(super) values: Vec<Vec<f64>>,
    /// Values of the first and the last colour.
    pub(super) range: (f64, f64),
    /// Whether every cell shows its value in percent.
    pub(super) percent: bool,
}

impl HeatMap<'_> {
    /// Writes the map to an .svg or .png file.
    pub(super) fn save(&self, path: &Path) -> Result<()> {
        save(self, path, (760, 480))
    }
}

impl Figure for HeatMap<'_> {
    fn draw<DB: DrawingBackend>(
        &self,
        area: &DrawingArea<DB, Shift>,
    ) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
        area.fill(&WHITE)?;
        let (columns, rows) = (self.columns.len(), self.rows.len());
        let (area, legend) = area.split_horizontally(680);
        let mut chart = ChartBuilder::on(&area)
            .caption(self.title, ("sans-serif", 18))
            .margin(10)
            .x_label_area_size(45)
            .y_label_area_size(75)
            .build_cartesian_2d(0.0..columns as f64, 0.0..rows as f64)?;
        // A tick stands at the middle of its cell.
        let name = |names: &[String], at: f64| {
            let index = at - 0.5;
            let whole = (index - index.round()).abs() < 1e-6 && index > -0.25;
            names.get(index.round() as usize).filter(|_| whole).cloned().unwrap_or_default()
        };
        let ticks = |count: usize| if count <= 16 { 2 * count + 1 } else { 17 };
        chart
            .configure_mesh()
            .disable_mesh()
            .x_labels(ticks(columns))
            .y_labels(ticks(rows))
            .x_label_formatter(&|&at| {
                name(&self.columns, if columns <= 16 { at } else { at.round() + 0.5 })
            })
            .y_label_formatter(&|&at| {
                name(&self.rows, if rows <= 16 { at } else { at.round() + 0.5 })
            })
            .x_desc(self.x)
            .y_desc(self.y)
            .draw()?;
        let (low, high) = self.range;
        let share = |value: f64| if high > low { (value - low) / (high - low) } else { 0.0 };
        for (row, values) in self.values.iter().enumerate() {
            for (column, &value) in values.iter().enumerate().filter(|(_, value)| !value.is_nan()) {
                let (x, y) = (column as f64, row as f64);
                let cell = [(x, y), (x + 1.0, y + 1.0)];
                let color = color(share(value));
                chart.draw_series([Rectangle::new(cell, color.filled())])?;
                if self.percent {
                    let text = format!("{:.0}", 100.0 * value);
                    let ink = if share(value) > 0.6 { BLACK } else { WHITE };
                    let middle = Pos::new(HPos::Center, VPos::Center);
                    let style = ("sans-serif", 14).into_font().color(&ink).pos(middle);
                    chart.draw_series([Text::new(text, (x + 0.5, y + 0.5), style)])?;
                }
            }
        }
        let steps = 32;
        let (top, height) = (60, 320);
        for step in 0..steps {
            let share = f64::from(step) / f64::from(steps - 1);
            let y = top + height * (steps - 1 - step) / steps;
            let cell = [(5, y), (20, y + height / steps + 1)];
            legend.draw(&Rectangle::new(cell, color(share).filled()))?;
        }
        for (value, y) in [(high, top), (low, top + height - 12)] {
            let text =
                if self.percent { format!("{:.0}%", 100.0 * value) } else { format!("{value:.3}") };
            legend.draw(&Text::new(text, (24, y), ("sans-serif", 13)))?;
        }
        Ok(())
    }
}

/// The colour of a share of the range: dark blue, green, yellow, evenly lighter.
fn color(share: f64) -> RGBColor {
    const STOPS: [[f64; 3]; 5] = [
        [40.0, 10.0, 85.0],
        [50.0, 75.0, 140.0],
        [30.0, 145.0, 140.0],
        [110.0, 200.0, 85.0],
        [250.0, 230.0, 40.0],
    ];
    let at = share.clamp(0.0, 1.0) * (STOPS.len() - 1) as f64;
    let below = (at as usize).min(STOPS.len() - 2);
    let mix = |channel: usize| {
        let (a, b) = (STOPS[below][channel], STOPS[below + 1][channel]);
        (a + (b - a) * (at - below as f64)).round() as u8
    };
    RGBColor(mix(0), mix(1), mix(2))
}

/// Points of several series, joined in order where `joined`.
pub(super) struct Curves<'a> {
    pub(super) title: &'a str,
    pub(super) x: &'a str,
    pub(super) y: &'a str,
    pub(super) series: Vec<Curve>,
}

/// One series.
pub(super) struct Curve {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
    pub(super) joined: bool,
}

impl Curves<'_> {
    /// Writes the curves, over a logarithmic ordinate, to an .svg or .png file.
    pub(super) fn save(&self, path: &Path) -> Result<()> {
        if !self.has_points() {
            bail!("there is nothing to draw in {}", path.display());
        }
        save(self, path, (760, 480))
    }

    fn has_points(&self) -> bool {
        self.series.iter().flat_map(|curve| &curve.points).any(|point| point.1 > 0.0)
    }
}

/// Several plots beside each other.
pub(super) struct Panels<'a>(pub(super) Vec<Curves<'a>>);

impl Panels<'_> {
    /// Writes the plots to one .svg or .png file.
    pub(super) fn save(&self, path: &Path) -> Result<()> {
        if self.0.iter().any(|curves| !curves.has_points()) {
            bail!("there is nothing to draw in {}", path.display());
        }
        save(self, path, (560 * self.0.len() as u32, 480))
    }
}

impl Figure for Panels<'_> {
    fn draw<DB: DrawingBackend>(
        &self,
        area: &DrawingArea<DB, Shift>,
    ) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
        let areas = area.split_evenly((1, self.0.len()));
        self.0.iter().zip(&areas).try_for_each(|(curves, area)| curves.draw(area))
    }
}

impl Figure for Curves<'_> {
    fn draw<DB: DrawingBackend>(
        &self,
        area: &DrawingArea<DB, Shift>,
    ) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
        area.fill(&WHITE)?;
        let points = || {
            let all = self.series.iter().flat_map(|curve| curve.points.iter().copied());
            all.filter(|point| point.1 > 0.0)
        };
        let bounds = |of: fn((f64, f64)) -> f64| {
            points().map(of).fold((f64::MAX, f64::MIN), |(a, b), x| (a.min(x), b.max(x)))
        };
        let ((left, right), (bottom, top)) = (bounds(|point| point.0), bounds(|point| point.1));
        let margin = 0.03 * (right - left) + 1e-9;
        let mut chart = ChartBuilder::on(area)
            .caption(self.title, ("sans-serif", 18))
            .margin(10)
            .x_label_area_size(45)
            .y_label_area_size(75)
            .build_cartesian_2d(
                left - margin..right + margin,
                (bottom / 1.2..top * 1.2).log_scale(),
            )?;
        chart.configure_mesh().x_desc(self.x).y_desc(self.y).light_line_style(WHITE).draw()?;
        let colors = [BLUE, RED, RGBColor(0, 130, 60), RGBColor(150, 80, 0), MAGENTA, BLACK];
        for (curve, color) in self.series.iter().zip(colors.into_iter().cycle()) {
            let points = || curve.points.iter().copied().filter(|point| point.1 > 0.0);
            if curve.joined {
                chart.draw_series(LineSeries::new(points(), &color))?;
            }
            chart
                .draw_series(points().map(|point| Circle::new(point, 3, color.filled())))?
                .label(&curve.name)
                .legend(move |(x, y)| Circle::new((x + 8, y), 3, color.filled()));
        }
        chart.configure_series_labels().background_style(WHITE).border_style(BLACK).draw()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> HeatMap<'static> {
        HeatMap {
            title: "needle",
            x: "length",
            y: "depth",
            columns: ["256", "512"].map(String::from).into(),
            rows: ["0 %", "50 %", "100 %"].map(String::from).into(),
            values: vec![vec![1.0, 0.0], vec![0.5, f64::NAN], vec![0.25, 0.75]],
            range: (0.0, 1.0),
            percent: true,
        }
    }

    #[test]
    fn heat_maps_name_their_cells_in_svg_and_are_valid_png() {
        let folder = tempfile::tempdir().unwrap();
        let (svg, png) = (folder.path().join("map.svg"), folder.path().join("map.png"));
        map().save(&svg).unwrap();
        let text = std::fs::read_to_string(&svg).unwrap();
        for word in ["<svg", "needle", "length", "depth", "256", "512", "50 %", "75"] {
            assert!(text.contains(word), "{word}");
        }
        map().save(&png).unwrap();
        let file = std::io::BufReader::new(std::fs::File::open(&png).unwrap());
        let mut reader = png::Decoder::new(file).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (760, 480));
        // The colour of a cell of 100 %.
        let RGBColor(r, g, b) = color(1.0);
        assert!(pixels.chunks_exact(3).filter(|pixel| *pixel == [r, g, b]).count() > 10_000);
        let error = map().save(Path::new("map.gif")).unwrap_err().to_string();
        assert!(error.contains(".svg or a .png") && error.contains("map.gif"), "{error}");
    }

    #[test]
    fn curves_need_something_to_draw() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("curves.svg");
        let curve = |points| Curve { name: "uniform".into(), points, joined: true };
        let curves =
            |points| Curves { title: "t", x: "bits", y: "kld", series: vec![curve(points)] };
        assert!(curves(vec![(1.0, 0.0)]).save(&path).is_err());
        curves(vec![(3.0, 0.25), (4.0, 0.01)]).save(&path).unwrap();
        assert!(std::fs::read_to_string(&path).unwrap().contains("uniform"));
    }
}
