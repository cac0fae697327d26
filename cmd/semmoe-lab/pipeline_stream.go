// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/lab/stream"
)

const (
	// streamStep is the granularity of lengths, which are rounded up: a few tokens more do not change a schedule, and
	// equal lengths share a schedule.
	streamStep = 128
	// maxStreamLengths is the maximum number of different lengths: the schedule of each length is evaluated for all
	// lengths, which takes seconds for 256.
	maxStreamLengths = 256
)

// compareStream compares schedules for the lengths in the file of --stream.
func (f *pipelineFlags) compareStream(ctx context.Context, profile *hardware.Profile) (*stream.Comparison, error) {
	text, err := regularfile.Read(f.stream, cli.MaxInputBytes)
	if err != nil {
		return nil, cli.InputError(fmt.Errorf("--stream: %w", err))
	}
	counts, err := parseStream(text)
	if err != nil {
		return nil, cli.WithCode(fmt.Errorf("--stream: %s: %w", f.stream, err), cli.ExitInvalidFile)
	}
	var batches []stream.Batches
	for _, sequence := range slices.Sorted(maps.Keys(counts)) {
		problem, err := f.problem(profile, sequence)
		if err != nil {
			return nil, err
		}
		batches = append(batches, stream.Batches{Problem: problem, Count: counts[sequence]})
	}
	compared, err := stream.Compare(ctx, batches)
	if err != nil && ctx.Err() == nil {
		return nil, cli.UsageErrorf("--stream: %w", err)
	}
	return compared, err
}

// parseStream returns the number of batches of each length, rounded up.
func parseStream(text []byte) (map[int]int, error) {
	counts := map[int]int{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" {
			continue
		}
		length, err := strconv.Atoi(line)
		if err != nil || length < 1 || length > 1<<24 {
			return nil, fmt.Errorf("line %d is %q; it must be a number of tokens, 1 to %d", n, line, 1<<24)
		}
		counts[(length+streamStep-1)/streamStep*streamStep]++
	}
	switch {
	case lines.Err() != nil:
		return nil, lines.Err()
	case len(counts) == 0:
		return nil, fmt.Errorf("the file is empty; it must have one sample length in tokens per line")
	case len(counts) > maxStreamLengths:
		return nil, fmt.Errorf("the file has %d different lengths, rounded up to multiples of %d; the maximum is %d", len(counts), streamStep, maxStreamLengths)
	}
	return counts, nil
}

func printStream(out io.Writer, s *stream.Comparison) {
	if s == nil {
		return
	}
	a := s.Adaptive
	fmt.Fprintf(out, "\n%d batches of %d lengths, mean %.0f tokens: %.0f tokens/s with one schedule per length, on %d+%d ranks.\n",
		s.Batches, s.Lengths, s.MeanSequence, a.TokensPerSecond, a.AttentionRanks, a.ExpertRanks)
	fmt.Fprintf(out, "This is %.3f times the throughput of the constant schedule for %d tokens, nearest to the mean (%d+%d ranks), and %.3f times that of the best constant schedule, for %d tokens (%d+%d ranks).\n",
		a.TokensPerSecond/s.Mean.TokensPerSecond, s.Mean.Sequence, s.Mean.AttentionRanks, s.Mean.ExpertRanks,
		a.TokensPerSecond/s.Fixed.TokensPerSecond, s.Fixed.Sequence, s.Fixed.AttentionRanks, s.Fixed.ExpertRanks)
}
