// SPDX-License-Identifier: Apache-2.0

package enginecounts

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/observation/stepsizes"
)

const (
	// halfLife is the half-life of the weight of a counted step.
	halfLife = time.Hour
	// maxRanks is the maximum number of ranks of a pod, maxBuckets of buckets of a rank's histogram.
	maxRanks, maxBuckets = 1024, 256
	// maxCount is the maximum value of a counter: every integer up to it is exact as a float64.
	maxCount = 1 << 53
)

// rankSteps contains the step counters of one rank since the start of the engine.
type rankSteps struct {
	// buckets are cumulative histogram buckets by ascending bound in tokens. sum is the sum of the tokens of all steps.
	buckets []bucket
	sum     float64
	// running is the number of running requests. servers is the number of servers that count steps, each for its own
	// requests.
	running, servers float64
	// kinds contains the counters of decode and prefill steps.
	kinds [2]stepCount
}

type bucket struct{ bound, steps float64 }

type stepCount struct{ steps, tokens float64 }

const (
	decode = iota
	prefill
)

// stepReader collects the step counters from the lines of an exposition.
type stepReader struct {
	metrics *engine.StepMetrics
	ranks   map[string]*rankSteps
	// series contains the counters that were read.
	series map[string]bool
	// oneServer is true if one server counts all steps of the engine.
	oneServer bool
}

// line processes a line, which may belong to another metric.
func (r *stepReader) line(text []byte) error {
	m := r.metrics
	r.oneServer = r.oneServer || m.OneServer == "" || bytes.HasPrefix(text, []byte(m.OneServer+" "))
	name, rest, ok := bytes.Cut(text, []byte("{"))
	if !ok {
		return nil
	}
	metric := string(name)
	series, isOfHistogram := strings.CutPrefix(metric, m.Histogram)
	isOfHistogram = isOfHistogram && m.Histogram != "" && (series == "_bucket" || series == "_sum")
	if !isOfHistogram && (metric != m.Running || m.Running == "") && (metric != m.Steps && metric != m.Tokens || m.Steps == "") {
		return nil
	}
	labels, value, err := sample(rest)
	if err != nil {
		return fmt.Errorf("%s: %w", metric, err)
	}
	special, err := take(&labels, map[bool]string{true: "le", false: m.Kind}[isOfHistogram])
	if err != nil {
		return fmt.Errorf("%s: %w", metric, err)
	}
	full := metric + "{" + special + "," + labels
	if r.series[full] {
		return fmt.Errorf("%s{%.100q occurs twice", metric, labels)
	}
	r.series[full] = true
	of := r.ranks[labels]
	if of == nil {
		if len(r.ranks) == maxRanks {
			return fmt.Errorf("%s has more than %d ranks", metric, maxRanks)
		}
		of = &rankSteps{}
		r.ranks[labels] = of
	}
	switch {
	case series == "_sum" && isOfHistogram:
		of.sum = value
	case isOfHistogram:
		bound, err := strconv.ParseFloat(special, 64)
		if err != nil || math.IsNaN(bound) || len(of.buckets) == maxBuckets {
			return fmt.Errorf("%s has the bound %.40q, or more than %d bounds", metric, special, maxBuckets)
		}
		of.buckets = append(of.buckets, bucket{bound, value})
	case metric == m.Running:
		of.running = value
	default:
		for kind, names := range [2]engine.StepKind{decode: m.Decode, prefill: m.Prefill} {
			if metric == m.Steps && strings.HasPrefix(special, names.Steps) {
				of.kinds[kind].steps += value
			}
			if metric == m.Tokens && special == names.Tokens {
				of.kinds[kind].tokens += value
			}
		}
	}
	return nil
}

// sample splits the text after the metric name and "{" into the labels and the value.
func sample(text []byte) (labels string, value float64, err error) {
	end := bytes.LastIndexByte(text, '}')
	if end < 0 {
		return "", 0, errors.New("the labels have no end")
	}
	fields := bytes.Fields(text[end+1:])
	if len(fields) == 0 {
		return "", 0, errors.New("a series has no value")
	}
	switch value, err = strconv.ParseFloat(string(fields[0]), 64); { // messages contain no details that change between readings
	case err != nil || math.IsNaN(value):
		return "", 0, errors.New("a value is not a number")
	case value < 0:
		return "", 0, errors.New("a value is negative")
	case value > maxCount:
		return "", 0, errors.New("a value is infinite, or too large for a count")
	}
	return string(text[:end]), value, nil
}

// take removes a label from labels and returns its value; empty if the series lacks the label. It normalizes the format
// of the other labels.
func take(labels *string, name string) (value string, err error) {
	var kept []string
	for rest := strings.TrimLeft(*labels, ", "); rest != ""; rest = strings.TrimLeft(rest, ", ") {
		key, quoted, ok := strings.Cut(rest, "=")
		text, err := strconv.QuotedPrefix(quoted)
		if !ok || err != nil {
			return "", fmt.Errorf("the labels %.100q are invalid", *labels)
		}
		if rest = quoted[len(text):]; key != name {
			kept = append(kept, key+"="+text)
		} else if value, err = strconv.Unquote(text); err != nil {
			return "", fmt.Errorf("the label %s has the invalid value %.40q", key, text)
		}
	}
	*labels = strings.Join(kept, ",")
	return value, nil
}

// read returns the collected counters.
func (r *stepReader) read() (map[string]*rankSteps, error) {
	m := r.metrics
	counted := false
	for rank, of := range r.ranks {
		slices.SortStableFunc(of.buckets, func(a, b bucket) int { return int(math.Copysign(1, a.bound-b.bound)) })
		for i, b := range of.buckets {
			if i > 0 && (b.steps < of.buckets[i-1].steps || b.bound == of.buckets[i-1].bound) {
				return nil, fmt.Errorf("%s{%.100q counts fewer steps up to a larger bound, or has a bound twice", m.Histogram, rank)
			}
		}
		if n := len(of.buckets); n > 0 && !math.IsInf(of.buckets[n-1].bound, 1) {
			return nil, fmt.Errorf("%s{%.100q has no bucket +Inf", m.Histogram, rank)
		}
		counted = counted || len(of.buckets) > 0 || m.Steps != ""
		if of.servers = 1; !r.oneServer {
			of.servers = float64(len(r.ranks))
		}
	}
	switch {
	case counted:
		return r.ranks, nil
	case m.Steps != "":
		return nil, fmt.Errorf("no %s: the engine has computed nothing yet, or has no such metric", m.Steps) // the metric appears with the first step
	}
	return nil, fmt.Errorf("no %s", m.Histogram)
}

// since returns the steps that a rank has counted since an earlier reading. It returns errRestarted if the engine was
// restarted.
func (of *rankSteps) since(before *rankSteps) (counted []stepsOf, _ error) {
	for kind, c := range of.kinds {
		steps, tokens := c.steps-before.kinds[kind].steps, c.tokens-before.kinds[kind].tokens
		if steps < 0 || tokens < 0 {
			return nil, errRestarted
		}
		if steps > 0 && tokens > 0 {
			counted = append(counted, stepsOf{tokens: tokens / steps, steps: steps, prefill: kind == prefill})
		}
	}
	tokens := of.sum - before.sum
	if tokens < 0 || len(of.buckets) != len(before.buckets) {
		return nil, errRestarted
	}
	inBuckets, err := sizesIn(of.buckets, before.buckets, tokens)
	running := max(of.running, before.running, 1)
	for i := range inBuckets {
		c := &inBuckets[i]
		if c.prefill = c.lower >= running; !c.prefill && of.servers > 1 {
			// The parts of a decode step are similar. Together they have at most one token per request.
			whole := max(c.tokens, min(of.servers*c.tokens, running))
			c.tokens, c.steps = whole, c.steps*c.tokens/whole
		}
	}
	return append(counted, inBuckets...), err
}

// sizesIn estimates the tokens per step from a histogram and the sum of its tokens since an earlier reading. Each step
// first gets the geometric mean of the bounds of its bucket. Then all sizes are scaled to match the sum, within their
// bounds.
func sizesIn(buckets, before []bucket, tokens float64) (counted []stepsOf, _ error) {
	var last, lastBefore bucket
	estimated := 0.0
	for i, b := range buckets {
		steps := (b.steps - last.steps) - (before[i].steps - lastBefore.steps)
		if steps < 0 || b.bound != before[i].bound {
			return nil, errRestarted
		}
		if steps > 0 {
			size := math.Sqrt(max(last.bound, 1) * max(b.bound, 1))
			if math.IsInf(b.bound, 1) {
				size = max(last.bound, (tokens-estimated)/steps) // the remaining tokens
			}
			counted = append(counted, stepsOf{tokens: size, steps: steps, lower: last.bound, upper: b.bound})
			estimated += size * steps
		}
		last, lastBefore = b, before[i]
	}
	for i := range counted {
		c := &counted[i]
		c.tokens = min(max(c.tokens*tokens/estimated, c.lower), c.upper)
	}
	return counted, nil
}

// errRestarted is returned after a reset of the engine's counters.
var errRestarted = errors.New("the engine was restarted")

// stepsOf is a group of steps of one rank with a similar number of tokens, and the bounds of that number.
type stepsOf struct {
	tokens, steps float64
	lower, upper  float64
	prefill       bool
}

// podSteps accumulates the steps of a pod.
type podSteps struct {
	last      map[string]*rankSteps
	at        time.Time
	histogram stepsizes.Histogram
	problem   string
}

// add adds the steps counted since the last reading. Ranks compute steps together, so a step has the tokens of all
// ranks. It is not known which counts of the ranks belong to the same step. If a rank has counted fewer steps than
// another, its missing steps were empty. The remaining steps are treated as steps of that number of ranks.
func (p *podSteps) add(ranks map[string]*rankSteps, now time.Time) {
	last, before := p.last, p.at
	p.last, p.at, p.problem = ranks, now, ""
	if last == nil || now.Before(before) {
		return
	}
	p.histogram.Fade(math.Exp2(-now.Sub(before).Hours() / halfLife.Hours()))
	var all []stepsOf
	sum, most := 0.0, 0.0
	for name, of := range ranks {
		began := last[name]
		if began == nil {
			began = &rankSteps{buckets: slices.Clone(of.buckets)}
			for i := range began.buckets {
				began.buckets[i].steps = 0
			}
		}
		counted, err := of.since(began)
		if err != nil {
			return
		}
		steps := 0.0
		for _, c := range counted {
			steps += c.steps
		}
		all, sum, most = append(all, counted...), sum+steps, max(most, steps)
	}
	for _, c := range all {
		steps := c.steps * most / sum
		inPrefill := 0.0
		if c.prefill {
			inPrefill = steps
		}
		p.histogram.Add(c.tokens*sum/most, steps, inPrefill)
	}
}
