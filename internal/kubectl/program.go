package kubectl

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/buildinfo"
	"github.com/semmoe/operator/internal/kubectl/terminal"
	"github.com/semmoe/operator/internal/printable"
)

// Program is one run of the plugin, with all that it knows of the process around it.
type Program struct {
	Out, Err io.Writer
	Getenv   func(string) string
	Now      func() time.Time
	// Wait passes the time between two looks; it ends with the context's error.
	Wait func(ctx context.Context, d time.Duration) error

	// style, errStyle and open are others in tests.
	style, errStyle terminal.Style
	open            func() (*Cluster, error)
	connection      connection
	output          string
}

// Main runs the plugin with a process's arguments, and returns its exit code.
func Main(ctx context.Context, args []string, out, err io.Writer, getenv func(string) string) int {
	p := &Program{Out: out, Err: err, Getenv: getenv, Now: time.Now, Wait: wait, style: terminal.Of(out, getenv), errStyle: terminal.Of(err, getenv)}
	p.open = p.connection.open
	return p.run(ctx, args)
}

// completionName is what kubectl calls to complete this plugin's arguments: the binary answers under that name, too.
const completionName = "kubectl_complete-semmoe"

func (p *Program) run(ctx context.Context, args []string) int {
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
	message, code := told(err)
	if ctx.Err() != nil {
		return exitError // Ctrl-C: whoever pressed it knows
	}
	fmt.Fprint(p.Err, p.errStyle.Paragraph(terminal.Text{{Text: "error: ", Tone: terminal.Bad}, {Text: message}}, 0))
	return code
}

const longHelp = `Look at MoEDeployments and their plans, and say what is to become of them.

Exit codes: 0 done, also where it was so already; 1 the cluster cannot be reached or refuses, or something
else has failed; 2 the command line must be changed; 3 what is named does not exist, or the operator is not
installed; 4 it cannot be done as things are.`

// command is the plugin's command with all of its subcommands.
func (p *Program) command() *cobra.Command {
	root := &cobra.Command{
		Use: "semmoe", Short: "Look at MoEDeployments and their plans, and say what is to become of them", Long: longHelp,
		Annotations:  map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl semmoe"},
		SilenceUsage: true, SilenceErrors: true,
		Version:           buildinfo.Read().String(),
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(*cobra.Command, []string) error { return p.checkOutput() },
	}
	root.Args = func(_ *cobra.Command, args []string) error {
		if len(args) > 0 {
			return usageErrorf("%q is no command: see kubectl semmoe --help", args[0])
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
	flags.StringVarP(&p.output, "output", "o", "", "json, for programs; without it text for people")
	root.AddCommand(p.statusCommand(), p.explainCommand(), p.diffCommand(), p.topCommand(), p.approveCommand(), p.rollbackCommand(),
		p.pauseCommand(), p.resumeCommand(), p.replanCommand(), p.reportCommand())
	return root
}

func (p *Program) checkOutput() error {
	if p.output != "" && p.output != "json" {
		return usageErrorf("--output is %q; allowed is json", p.output)
	}
	return nil
}

// arguments allows as many names as given, which the usage of the command calls.
func arguments(least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return usageErrorf("%s: usage: %s", counted(len(args)), cmd.UseLine())
		}
		return nil
	}
}

// notEmpty refuses a flag that is given and empty, as one of a variable that is not set would be, where a command does something else
// without it.
func notEmpty(cmd *cobra.Command, flag string) error {
	if f := cmd.Flags().Lookup(flag); f.Changed && f.Value.String() == "" {
		return usageErrorf("--%s is empty: give the name of a plan, or leave the flag out", flag)
	}
	return nil
}

func counted(n int) string {
	switch n {
	case 0:
		return "no name is given"
	case 1:
		return "one name is given"
	}
	return fmt.Sprintf("%d names are given", n)
}

// write writes a value as JSON, or text.
func (p *Program) write(value any, text func() string) error {
	if p.output == "json" {
		encoder := json.NewEncoder(printable.JSON(p.Out))
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")
		return encoder.Encode(value)
	}
	_, err := io.WriteString(p.Out, text())
	return err
}

// warn writes a warning for people.
func (p *Program) warn(format string, args ...any) {
	fmt.Fprint(p.Err, p.errStyle.Paragraph(terminal.Text{{Text: "warning: ", Tone: terminal.Busy}, {Text: fmt.Sprintf(format, args...)}}, 0))
}

// watchPeriod is how often --watch looks.
const watchPeriod = 2 * time.Second

// watch shows what look tells: once, or again and again until the context ends. On a terminal each look replaces the one before; else only
// what has changed is written.
func (p *Program) watch(ctx context.Context, again bool, look func(ctx context.Context) (value any, text string, err error)) error {
	last := ""
	for {
		value, text, err := look(ctx)
		if err != nil {
			return err
		}
		shown, err := json.Marshal(value)
		if err != nil {
			return err
		}
		if string(shown) != last || p.style.Color {
			if again && p.style.Color {
				fmt.Fprint(p.Out, "\x1b[H\x1b[2J")
			} else if last != "" && p.output == "" {
				fmt.Fprintln(p.Out)
			}
			if err := p.write(value, func() string { return text }); err != nil {
				return err
			}
		}
		if last = string(shown); !again {
			return nil
		}
		if p.Wait(ctx, watchPeriod) != nil {
			return nil // Ctrl-C is how a watch ends
		}
	}
}

// wait passes time.
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
