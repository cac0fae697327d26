// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/httpserver/buildinfo"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/kubectl/terminal"
)

// program is one run of the plugin. Its fields are the plugin's only access to the process environment.
type program struct {
	Out, Err io.Writer
	Getenv   func(string) string
	Now      func() time.Time
	// Wait sleeps between two polls of --watch. It returns the context's error if the context ends.
	Wait func(ctx context.Context, d time.Duration) error

	// Tests replace style, errStyle and open.
	style, errStyle terminal.Style
	open            func() (*Cluster, error)
	connection      connection
	output          string
}

// Main runs the plugin with the arguments of the process and returns the exit code.
func Main(ctx context.Context, args []string, out, err io.Writer, getenv func(string) string) int {
	p := &program{Out: out, Err: err, Getenv: getenv, Now: time.Now, Wait: wait, style: terminal.Of(out, getenv), errStyle: terminal.Of(err, getenv)}
	p.open = p.connection.open
	return p.run(ctx, args)
}

// completionName is the name of the executable that kubectl runs to complete the plugin's arguments. It is a link to
// the same binary.
const completionName = "kubectl_complete-semmoe"

func (p *program) run(ctx context.Context, args []string) int {
	root := p.command()
	words := args[1:]
	if filepath.Base(args[0]) == completionName {
		words = append([]string{cobra.ShellCompRequestCmd}, words...)
	}
	root.SetArgs(words)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	message, code := describeError(err)
	if ctx.Err() != nil {
		return exitError // after Ctrl-C no message is needed
	}
	fmt.Fprint(p.Err, p.errStyle.Paragraph(terminal.Text{{Text: "error: ", Tone: terminal.Bad}, {Text: message}}, 0))
	return code
}

const longHelp = `Inspect MoEDeployments and placement plans, and approve, roll back, pause or replan them.

Commands are idempotent and never prompt.

Exit codes: 0 success, also if nothing had to change; 1 the cluster is unreachable, the API server denied the
request, or another error occurred; 2 the command line is invalid; 3 a named object does not exist, or the
operator is not installed; 4 the present state does not allow the action.`

// command returns the root command with all subcommands.
func (p *program) command() *cobra.Command {
	root := &cobra.Command{
		Use: "semmoe", Short: "Inspect MoEDeployments and placement plans, and approve, roll back, pause or replan them", Long: longHelp,
		Annotations:  map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl semmoe"},
		SilenceUsage: true, SilenceErrors: true,
		Version:           buildinfo.Read().String(),
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return p.checkOutput(cmd) },
	}
	root.Args = func(_ *cobra.Command, args []string) error {
		if len(args) > 0 {
			return usageErrorf("unknown command %q: see kubectl semmoe --help", args[0])
		}
		return nil
	}
	root.SetOut(p.Out)
	root.SetErr(p.Err)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageErrorf("%v: see %s --help", err, cmd.CommandPath())
	})
	flags := root.PersistentFlags()
	p.connection.bind(flags)
	flags.StringVarP(&p.output, "output", "o", "", "output format: json; of advise also yaml and patch (default: text)")
	root.AddCommand(p.statusCommand(), p.explainCommand(), p.diffCommand(), p.topCommand(), p.adviseCommand(), p.approveCommand(), p.rollbackCommand(),
		p.pauseCommand(), p.resumeCommand(), p.replanCommand(), p.reportCommand())
	return root
}

// furtherOutputs are the output formats of commands in addition to text and json.
var furtherOutputs = map[string][]string{"advise": {"yaml", "patch"}}

func (p *program) checkOutput(cmd *cobra.Command) error {
	further := furtherOutputs[cmd.Name()]
	if p.output == "" || p.output == "json" || slices.Contains(further, p.output) {
		return nil
	}
	if len(further) > 0 {
		return usageErrorf("--output: %q is invalid: allowed are json, %s", p.output, strings.Join(further, ", "))
	}
	return usageErrorf("--output: %q is invalid: allowed is json", p.output)
}

// arguments accepts between minArgs and maxArgs names. Its error contains the usage line of the command.
func arguments(minArgs, maxArgs int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < minArgs || len(args) > maxArgs {
			return usageErrorf("%s: usage: %s", countNames(len(args)), cmd.UseLine())
		}
		return nil
	}
}

// notEmpty rejects a flag that is set to the empty string, for example by an unset shell variable. Without the flag the
// command would do something else than the user intends.
func notEmpty(cmd *cobra.Command, flag string) error {
	if f := cmd.Flags().Lookup(flag); f.Changed && f.Value.String() == "" {
		return usageErrorf("--%s is empty: set it to the name of a plan, or omit the flag", flag)
	}
	return nil
}

func countNames(n int) string {
	switch n {
	case 0:
		return "name is missing"
	case 1:
		return "wrong number of names (1)"
	}
	return fmt.Sprintf("wrong number of names (%d)", n)
}

// write prints a value as JSON, or as text.
func (p *program) write(value any, text func() string) error {
	if p.output == "json" {
		encoder := json.NewEncoder(printable.JSON(p.Out))
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")
		return encoder.Encode(value)
	}
	_, err := io.WriteString(p.Out, text())
	return err
}

// warn prints a warning to standard error.
func (p *program) warn(format string, args ...any) {
	fmt.Fprint(p.Err, p.errStyle.Paragraph(terminal.Text{{Text: "warning: ", Tone: terminal.Busy}, {Text: fmt.Sprintf(format, args...)}}, 0))
}

// watchPeriod is the poll interval of --watch.
const watchPeriod = 2 * time.Second

// watch prints the result of poll once, or repeatedly until the context ends. On a terminal each result replaces the
// one before. In a pipe only changed results are printed.
func (p *program) watch(ctx context.Context, repeat bool, poll func(ctx context.Context) (value any, text string, err error)) error {
	last := ""
	for {
		value, text, err := poll(ctx)
		if err != nil {
			return err
		}
		shown, err := json.Marshal(value)
		if err != nil {
			return err
		}
		if string(shown) != last || p.style.Color {
			if repeat && p.style.Color {
				fmt.Fprint(p.Out, "\x1b[H\x1b[2J")
			} else if last != "" && p.output == "" {
				fmt.Fprintln(p.Out)
			}
			if err := p.write(value, func() string { return text }); err != nil {
				return err
			}
		}
		if last = string(shown); !repeat {
			return nil
		}
		if p.Wait(ctx, watchPeriod) != nil {
			return nil // a watch ends with Ctrl-C
		}
	}
}

// wait sleeps for a duration, or until the context ends.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
