use anyhow::{bail, Context, Result};
use clap::Parser;
use std::path::PathBuf;

/// Convert between units of length.
#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    /// The amount to convert
    amount: f64,
    /// Unit of the amount: m, km, ft, mi
    #[arg(short, long, default_value = "m")]
    from: String,
    /// Unit to convert to
    #[arg(short, long)]
    to: String,
    /// Append the result to this file
    #[arg(long)]
    log: Option<PathBuf>,
}

fn metres(unit: &str) -> Result<f64> {
    Ok(match unit {
        "m" => 1.0,
        "km" => 1000.0,
        "ft" => 0.3048,
        "mi" => 1609.344,
        other => bail!("unknown unit {other:?}"),
    })
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let result = arguments.amount * metres(&arguments.from)? / metres(&arguments.to)?;
    println!("{result:.4} {}", arguments.to);
    if let Some(path) = &arguments.log {
        std::fs::write(path, format!("{result}\n")).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
