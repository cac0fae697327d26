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

	"github.com/semmoe/operator/internal/regularfile"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
)

const (
	// streamStep is what lengths are rounded up to: a few tokens more change no schedule, and a length that has occurred has one.
	streamStep = 128
	// maxStreamLengths bounds the different lengths, each of whose schedules is tried for all: 256 are seconds.
	maxStreamLengths = 256
)

// compareStream compares schedules for the lengths of the file of --stream.
func (f *pipelineFlags) compareStream(ctx context.Context, profile *hardware.Profile) (*pipeline.Stream, error) {
	text, err := regularfile.Read(f.stream, maxInputBytes)
	if err != nil {
		return nil, inputError(fmt.Errorf("--stream: %w", err))
	}
	counts, err := parseStream(text)
	if err != nil {
		return nil, codedError{fmt.Errorf("--stream: %s: %w", f.stream, err), exitInvalidFile}
	}
	var stream []pipeline.Batches
	for _, sequence := range slices.Sorted(maps.Keys(counts)) {
		problem, err := f.problem(profile, sequence)
		if err != nil {
			return nil, err
		}
		stream = append(stream, pipeline.Batches{Problem: problem, Count: counts[sequence]})
	}
	compared, err := pipeline.SearchStream(ctx, stream)
	if err != nil && ctx.Err() == nil {
		return nil, usageErrorf("--stream: %w", err)
	}
	return compared, err
}

// parseStream counts the batches of each length, rounded up.
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
		return nil, fmt.Errorf("it has no length: give the tokens of a sample of each batch, one number a line")
	case len(counts) > maxStreamLengths:
		return nil, fmt.Errorf("it has %d lengths that differ when they are rounded up to multiples of %d; allowed are %d", len(counts), streamStep, maxStreamLengths)
	}
	return counts, nil
}

func printStream(out io.Writer, s *pipeline.Stream) {
	if s == nil {
		return
	}
	a := s.Adaptive
	fmt.Fprintf(out, "\n%d batches of %d lengths, %.0f tokens in the mean: %.0f tokens/s with a schedule for each length, on %d+%d ranks.\n",
		s.Batches, s.Lengths, s.MeanSequence, a.TokensPerSecond, a.AttentionRanks, a.ExpertRanks)
	fmt.Fprintf(out, "That is %.3f times what the schedule for %d tokens, nearest to the mean, reaches on all (%d+%d ranks), and %.3f times the best fixed one, for %d (%d+%d).\n",
		a.TokensPerSecond/s.Mean.TokensPerSecond, s.Mean.Sequence, s.Mean.AttentionRanks, s.Mean.ExpertRanks,
		a.TokensPerSecond/s.Fixed.TokensPerSecond, s.Fixed.Sequence, s.Fixed.AttentionRanks, s.Fixed.ExpertRanks)
}
