package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/engine/sglang"
	"github.com/semmoe/operator/internal/inspection"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/internal/regularfile"
)

const (
	// exitInvalidModel tells a Job's podFailurePolicy that another attempt would fail in the same way.
	exitInvalidModel = 3
	// terminationLog is where Kubernetes looks for a container's termination message unless the pod says otherwise.
	terminationLog = "/dev/termination-log"
	// terminationLimit is the size above which the kubelet cuts off a termination message.
	terminationLimit = 4096
)

func newInspectCommand() *cobra.Command {
	var modelPath, dataset, messageFile string
	var expertParallelSize int
	cmd := &cobra.Command{
		Use:   "inspect --model-path DIR",
		Short: "Validate a checkpoint without loading weights, and a data set, and describe them as JSON",
		Long: "Validate a Hugging Face checkpoint of a Mixture-of-Experts model without loading weights, and a data set where one is\n" +
			"given, and describe them as JSON on standard output and in the termination message. Exit code 3: the model, the data set\n" +
			"or an argument must be changed; 1: try again.",
		Args: invalidArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			debug.SetMemoryLimit(headerMemory)
			report, err := inspect(modelPath, dataset, cmd.Flags().Changed("expert-parallel-size"), expertParallelSize)
			if err != nil {
				err = modelError{err}
				if writeErr := writeTerminationMessage(messageFile, oneLine(err.Error())); writeErr != nil {
					printError(cmd.ErrOrStderr(), writeErr)
				}
				return err
			}
			if report.TiedEmbeddings && slices.Contains(sglang.IgnoresTiedEmbeddings, report.Family) {
				fmt.Fprintf(cmd.ErrOrStderr(), "semmoe: warning: config.json ties the embeddings (tie_word_embeddings), and no tensor is named lm_head.weight. "+
					"SGLang ignores that for %s: every logit is 0, and its health check passes. Write lm_head.weight as a tensor, or serve the model by another engine.\n", report.Family)
			}
			return printReport(cmd.OutOrStdout(), messageFile, report)
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return modelError{checkpoint.Invalidf("%v", err)} })
	cmd.Flags().StringVar(&modelPath, "model-path", "", "directory of the checkpoint (required)")
	cmd.Flags().StringVar(&dataset, "dataset", "", "also check this JSONL file, a data set for profiling")
	cmd.Flags().IntVar(&expertParallelSize, "expert-parallel-size", 0, "also check that this many ranks divide the experts")
	cmd.Flags().StringVar(&messageFile, "termination-message", "", "file for the termination message (default "+terminationLog+", if it exists)")
	return cmd
}

func inspect(modelPath, dataset string, checkSize bool, expertParallelSize int) (inspection.Report, error) {
	if modelPath == "" {
		return inspection.Report{}, checkpoint.Invalidf("--model-path is missing: give the directory of the checkpoint")
	}
	report, err := checkpoint.Inspect(modelPath)
	if err == nil && checkSize {
		err = report.CheckExpertParallelSize(expertParallelSize)
	}
	if err != nil || dataset == "" {
		return inspection.Report{Report: report}, err
	}
	found, err := profile.InspectDataset(dataset)
	return inspection.Report{Report: report, Dataset: &found}, err
}

func printReport(out io.Writer, messageFile string, report inspection.Report) error {
	text, err := json.Marshal(report)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(out, "%s\n", text); err != nil {
		return err
	}
	return writeTerminationMessage(messageFile, string(text))
}

// writeTerminationMessage writes in place: the kubelet bind-mounts the file, so that it cannot be replaced by a rename.
// Without a named file it writes only where Kubernetes has provided one.
func writeTerminationMessage(path, message string) error {
	flags := os.O_WRONLY | os.O_TRUNC
	if path == "" {
		if _, err := os.Stat(terminationLog); err != nil {
			return nil
		}
		path = terminationLog
	} else {
		flags |= os.O_CREATE
	}
	if err := regularfile.Check(path); err != nil {
		return fmt.Errorf("termination message: %w", err)
	}
	file, err := os.OpenFile(path, flags, 0o644)
	if err != nil {
		return fmt.Errorf("termination message: %w", err)
	}
	if _, err := file.WriteString(message); err != nil {
		file.Close()
		return fmt.Errorf("termination message: %w", err)
	}
	return file.Close()
}

// oneLine makes a message that shows well in a condition and fits the termination message.
func oneLine(message string) string {
	message = strings.Join(strings.Fields(message), " ")
	if len(message) > terminationLimit {
		message = strings.ToValidUTF8(message[:terminationLimit], "")
	}
	return message
}

// modelError carries the exit code that tells a fault of the model, the data set or the arguments from a failure to read
// them.
type modelError struct{ error }

func (e modelError) Unwrap() error { return e.error }

func (e modelError) ExitCode() int {
	var dataset *profile.DatasetError
	if checkpoint.IsInvalid(e.error) || errors.As(e.error, &dataset) {
		return exitInvalidModel
	}
	return 1
}
