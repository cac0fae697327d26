use serde::{Deserialize, Serialize};
use std::time::Duration;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Config {
    pub listen: String,
    #[serde(default = "default_workers")]
    pub workers: usize,
    #[serde(default)]
    pub tls: Option<Tls>,
    #[serde(with = "humantime_serde", default = "default_timeout")]
    pub timeout: Duration,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Tls {
    pub certificate: String,
    pub key: String,
}

fn default_workers() -> usize {
    std::thread::available_parallelism().map(|n| n.get()).unwrap_or(1)
}

fn default_timeout() -> Duration {
    Duration::from_secs(30)
}

impl Config {
    pub fn validate(&self) -> Result<(), String> {
        if self.workers == 0 {
            return Err("workers must be at least 1".to_string());
        }
        if self.timeout.is_zero() {
            return Err("timeout must not be zero".to_string());
        }
        Ok(())
    }
}
