package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/semmoe/operator/solver"
)

// percent writes a share as it is spoken of.
func percent(share float64) string { return strconv.FormatFloat(100*share, 'f', 1, 64) + "%" }

// points writes a number of percent.
func points(p float64) string {
	text := strconv.FormatFloat(p, 'f', 1, 64)
	if text == "-0.0" {
		text = "0.0"
	}
	return strings.Replace(text, "-", "−", 1) + "%"
}

// times writes a factor.
func times(factor float64) string { return strconv.FormatFloat(factor, 'f', 2, 64) + "×" }

// fall words by how much a time falls or rises, with the interval of the percentage in the same direction.
func fall(percent, low, high float64) string {
	verb := "falls"
	if strings.HasPrefix(points(percent), "−") {
		verb, percent, low, high = "rises", -percent, -high, -low
	}
	return fmt.Sprintf("%s by %s (95%% interval: %s to %s)", verb, points(percent), points(low), points(high))
}

// count writes a number with separators.
func count(n int) string {
	digits := strconv.Itoa(n)
	var b strings.Builder
	for i, digit := range digits {
		if i > 0 && (len(digits)-i)%3 == 0 && digits[i-1] != '-' {
			b.WriteByte(',')
		}
		b.WriteRune(digit)
	}
	return b.String()
}

// plural is a counted thing.
func plural(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return count(n) + " " + thing + "s"
}

// microseconds writes a time.
func microseconds(us float64) string {
	sign := ""
	if us < 0 {
		sign, us = "−", -us
	}
	switch {
	case us >= 1e5:
		return sign + strconv.FormatFloat(us/1e3, 'f', 0, 64) + " ms"
	case us >= 1e4:
		return sign + strconv.FormatFloat(us/1e3, 'f', 1, 64) + " ms"
	case us >= 1e3:
		return sign + strconv.FormatFloat(us/1e3, 'f', 2, 64) + " ms"
	case us >= 100:
		return sign + strconv.FormatFloat(us, 'f', 0, 64) + " µs"
	default:
		return sign + strconv.FormatFloat(us, 'f', 1, 64) + " µs"
	}
}

// bytes writes a size, in powers of ten.
func bytes10(n float64) string {
	for _, unit := range []struct {
		size float64
		name string
	}{{1e12, "TB"}, {1e9, "GB"}, {1e6, "MB"}, {1e3, "kB"}} {
		if n >= unit.size {
			if n >= 100*unit.size {
				return strconv.FormatFloat(n/unit.size, 'f', 0, 64) + " " + unit.name
			}
			return strconv.FormatFloat(n/unit.size, 'f', 1, 64) + " " + unit.name
		}
	}
	return strconv.FormatFloat(math.Round(n), 'f', 0, 64) + " bytes"
}

// short is a digest as objects are named by.
func short(digest string) string { return digest[:min(16, len(digest))] }

// holder is what has a rank: a request, or a token in each layer.
func (d *Data) holder() string {
	if d.DataParallel() {
		return "request"
	}
	return "token"
}

// today names what the plan is compared with.
func (d *Data) today() string {
	if d.Today != "" {
		return "the plan in service, " + short(d.Today)
	}
	return "the default placement"
}

// headline is the sentence that a reader takes away.
func (d *Data) headline() string {
	s := d.Score
	if p := d.Promise; s == nil && p != nil && p.After > 0 && p.RanksBefore == 0 {
		return fmt.Sprintf("This plan promises to keep %s of expert activations on the rank of their %s, against %s %s.", percent(p.After), d.holder(), percent(p.Before), p.Against)
	}
	if s == nil {
		return fmt.Sprintf("This plan places %s of each of %s on %s.", plural(d.Experts, "expert"), plural(d.Layers, "MoE layer"), plural(d.Ranks, "rank"))
	}
	keeps := "This plan keeps"
	if d.Change.Total == 0 && !d.Change.OtherRanks {
		keeps = "This plan leaves every expert where it is, and keeps"
	}
	return fmt.Sprintf("%s %s of expert activations on the rank of their %s, against %s today.", keeps, percent(s.After), d.holder(), percent(s.Before))
}

// verdict says whether it pays.
func (d *Data) verdict() string {
	if d.Score == nil && d.Promise != nil {
		return d.Promise.Verdict
	}
	if d.Score == nil || d.Score.Times == nil {
		return ""
	}
	t := d.Score.Times
	at, served := "At "+count(t.Served.BatchTokens)+" tokens a batch", &t.Served
	change := fall(served.SavedPercent(), served.Low(), served.High())
	pays := fmt.Sprintf("At none of the batch sizes up to %s tokens does it gain %d%%.", count(batchSizes[len(batchSizes)-1]), solver.DefaultMinimumGainPercent)
	if t.PaysFrom > 0 {
		pays = fmt.Sprintf("It gains %d%% from %s tokens a batch on.", solver.DefaultMinimumGainPercent, count(t.PaysFrom))
	}
	if t.PromptTokens > 0 {
		pays += fmt.Sprintf(" The time to the first token of a prompt of %s %s at %s a batch.", plural(t.PromptTokens, "token"),
			fall(served.FirstPercent(), served.FirstLow(), served.FirstHigh()), plural(served.BatchTokens, "token"))
	}
	pays += " Times are modelled by the hardware profile " + t.Machines.Profile + "."
	switch served.Verdict() {
	case solver.Gain:
		return fmt.Sprintf("%s it pays: a MoE layer's modelled time %s. %s", at, change, pays)
	case solver.LocalityDoesNotPay:
		return fmt.Sprintf("%s latency dominates: even if every activation were local and all ranks equally busy, a MoE layer's modelled time would change by %s; by this plan it %s. %s",
			at, points(-served.Percent(served.Most)), change, pays)
	}
	if served.Pays() {
		return fmt.Sprintf("%s it may pay, but the requests do not prove it: a MoE layer's modelled time %s. %s", at, change, pays)
	}
	return fmt.Sprintf("%s no gain worth a roll-out is expected: a MoE layer's modelled time %s; the minimum is a fall of %d%%. %s", at, change, solver.DefaultMinimumGainPercent, pays)
}

// Summary is the headline and the verdict, for a terminal.
func (d *Data) Summary() string { return strings.TrimSpace(d.headline() + " " + d.verdict()) }
