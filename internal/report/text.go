// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/semmoe/operator/solver"
)

// percent formats a share as a percentage.
func percent(share float64) string { return strconv.FormatFloat(100*share, 'f', 1, 64) + "%" }

// points formats a percentage, with a typographic minus sign.
func points(p float64) string {
	text := strconv.FormatFloat(p, 'f', 1, 64)
	if text == "-0.0" {
		text = "0.0"
	}
	return strings.Replace(text, "-", "−", 1) + "%"
}

// times formats a factor.
func times(factor float64) string { return strconv.FormatFloat(factor, 'f', 2, 64) + "×" }

// fall describes the decrease or increase of a time, with the 95% confidence interval in the same direction.
func fall(percent, low, high float64) string {
	verb := "falls"
	if strings.HasPrefix(points(percent), "−") {
		verb, percent, low, high = "rises", -percent, -high, -low
	}
	return fmt.Sprintf("%s by %s (95%% interval: %s to %s)", verb, points(percent), points(low), points(high))
}

// count formats a number with thousands separators.
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

// plural formats a number with its noun.
func plural(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return count(n) + " " + thing + "s"
}

// microseconds formats a time given in microseconds, in µs or ms.
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

// bytes10 formats a number of bytes with decimal units.
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

// short returns the first 16 characters of a digest, as used in the names of objects.
func short(digest string) string { return digest[:min(16, len(digest))] }

// holder names the unit that has a rank: a request, or a token in each layer.
func (d *Data) holder() string {
	if d.DataParallel() {
		return "request"
	}
	return "token"
}

// today names the baseline of the comparison.
func (d *Data) today() string {
	if d.Today != "" {
		return "the plan in service, " + short(d.Today)
	}
	return "the default placement"
}

// headline returns the main result in a sentence.
func (d *Data) headline() string {
	s := d.Score
	if p := d.Promise; s == nil && p != nil && p.After > 0 && p.RanksBefore == 0 {
		return fmt.Sprintf("This plan promises to keep %s of expert activations on the rank of their %s, versus %s %s.", percent(p.After), d.holder(), percent(p.Before), p.Against)
	}
	if s == nil {
		return fmt.Sprintf("This plan places %s of each of %s on %s.", plural(d.Experts, "expert"), plural(d.Layers, "MoE layer"), plural(d.Ranks, "rank"))
	}
	keeps := "This plan keeps"
	if d.Change.Total == 0 && !d.Change.OtherRanks {
		keeps = "This plan moves no expert and keeps"
	}
	return fmt.Sprintf("%s %s of expert activations on the rank of their %s, versus %s today.", keeps, percent(s.After), d.holder(), percent(s.Before))
}

// verdict describes whether the plan pays.
func (d *Data) verdict() string {
	if d.Score == nil && d.Promise != nil {
		return d.Promise.Verdict
	}
	if d.Score == nil || d.Score.Times == nil {
		return ""
	}
	t := d.Score.Times
	at, served := "At "+count(t.Served.BatchTokens)+" tokens per batch", &t.Served
	change := fall(served.SavedPercent(), served.Low(), served.High())
	pays := fmt.Sprintf("It gains %[2]d%% at no batch size up to %[1]s tokens.", count(batchSizes[len(batchSizes)-1]), solver.DefaultMinimumGainPercent)
	if t.PaysFrom > 0 {
		pays = fmt.Sprintf("It gains at least %d%% from %s tokens per batch.", solver.DefaultMinimumGainPercent, count(t.PaysFrom))
	}
	if t.PromptTokens > 0 {
		pays += fmt.Sprintf(" The time to first token of a prompt of %s %s at %s per batch.", plural(t.PromptTokens, "token"),
			fall(served.FirstPercent(), served.FirstLow(), served.FirstHigh()), plural(served.BatchTokens, "token"))
	}
	pays += " Times are modelled with the hardware profile " + t.Machines.Profile + "."
	switch served.Verdict() {
	case solver.Gain:
		return fmt.Sprintf("%s the plan pays: the modelled time of an MoE layer %s. %s", at, change, pays)
	case solver.LocalityDoesNotPay:
		return fmt.Sprintf("%s latency dominates: even if every activation were local and all ranks had equal loads, the modelled time of an MoE layer would change by %s; with this plan it %s. %s",
			at, points(-served.Percent(served.MaxSaved)), change, pays)
	}
	if served.Pays() {
		return fmt.Sprintf("%s the plan may pay, but the gain is not statistically significant: the modelled time of an MoE layer %s. %s", at, change, pays)
	}
	return fmt.Sprintf("%s the expected gain is too small for a rollout: the modelled time of an MoE layer %s; the minimum is a fall of %d%%. %s", at, change, solver.DefaultMinimumGainPercent, pays)
}

// Summary returns the headline and the verdict, for a terminal.
func (d *Data) Summary() string { return strings.TrimSpace(d.headline() + " " + d.verdict()) }
