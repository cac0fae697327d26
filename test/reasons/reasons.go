// SPDX-License-Identifier: Apache-2.0

// Package reasons reads the condition reasons of each kind from the source code of the product. Tests compare them with
// the health checks of Argo CD (test/gitops) and with docs/troubleshooting.md (test/docs).
package reasons

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/sets"
)

// packages are the packages that set the conditions of a kind.
var packages = map[string][]string{
	"MoEDeployment": {
		"controllers/moedeployment", "controllers/moedeployment/decision", "controllers/moedeployment/locality", "controllers/moedeployment/traffic",
		"controllers/moedeployment/planner", "controllers/moedeployment/revisions", "internal/kube/podhealth",
	},
	"AffinityProfile": {"controllers/affinityprofile", "internal/kube/podhealth"},
	"PlacementPlan":   {"controllers/placementplan"},
}

// constants are further reasons of a kind: constants whose names do not begin with "reason", by the package that
// declares them.
var constants = map[string]map[string][]string{
	"MoEDeployment": {
		"api/v1alpha1":                       {"VerdictNoGainExpected", "VerdictLocalityDoesNotPay"},
		"controllers/moedeployment/locality": {"OnTarget", "BelowPromise", "Drifted"},
		"internal/engine":                    {"ReasonNoAllToAll"},
		"internal/observation/promquery":     {"NotAllowed", "Unavailable", "Refused", "Warned", "NoSeries", "SeveralSeries"},
		"internal/rollout":                   {"ReasonStarting", "ReasonSoaking", "ReasonInconclusive"},
	},
	"PlacementPlan": {"api/v1alpha1": {"VerdictNoGainExpected", "VerdictLocalityDoesNotPay"}},
}

// Kinds are the kinds with conditions.
var Kinds = []string{"MoEDeployment", "AffinityProfile", "PlacementPlan"}

// Of returns the condition reasons that the source code in a repository declares for a kind. It returns an error if a
// source does not parse, a package declares no reason, or a listed constant is missing.
func Of(repository, kind string) (sets.Set[string], error) {
	declared := sets.New[string]()
	for _, name := range packages[kind] {
		found, err := inPackage(repository, name)
		if err != nil {
			return nil, err
		}
		declared = declared.Union(found)
	}
	for name, of := range constants[kind] {
		found, err := inConstants(repository, name, of)
		if err != nil {
			return nil, err
		}
		declared = declared.Union(found)
	}
	return declared, nil
}

// parse reads the source files of a package, without its tests.
func parse(repository, name string) ([]*ast.File, error) {
	files, err := filepath.Glob(filepath.Join(repository, filepath.FromSlash(name), "*.go"))
	if err != nil {
		return nil, err
	}
	var parsed []*ast.File
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		syntax, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		parsed = append(parsed, syntax)
	}
	return parsed, nil
}

// inConstants returns the values of the named constants of a package.
func inConstants(repository, name string, of []string) (sets.Set[string], error) {
	r := reader{found: sets.New[string](), isReason: func(constant string) bool { return slices.Contains(of, constant) }}
	files, err := parse(repository, name)
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		ast.Inspect(file, func(node ast.Node) bool {
			if spec, ok := node.(*ast.ValueSpec); ok {
				r.constant(spec)
			}
			return true
		})
	}
	if len(r.found) != len(of) {
		return nil, fmt.Errorf("the constants %v of %s have the values %v", of, name, sets.List(r.found))
	}
	return r.found, nil
}

// inPackage returns the string literals that a package passes as a reason: to a field, a parameter or a result of that
// name, or as a constant whose name begins with it.
func inPackage(repository, name string) (sets.Set[string], error) {
	r := reader{positions: map[string]int{}, found: sets.New[string](), isReason: isReason}
	files, err := parse(repository, name)
	if err != nil {
		return nil, err
	}
	shared, err := parse(repository, "internal/kube/conditions")
	if err != nil {
		return nil, err
	}
	for _, file := range slices.Concat(shared, files) {
		ast.Inspect(file, r.declare)
	}
	for _, file := range files {
		ast.Inspect(file, r.collect)
	}
	if len(r.found) == 0 {
		return nil, fmt.Errorf("%s declares no reasons", name)
	}
	return r.found, nil
}

// reader collects the reasons of a package.
type reader struct {
	// positions are the structs and functions with a reason, by name, and the index of the field or parameter.
	positions map[string]int
	// isReason reports whether a constant or a variable of that name is a reason.
	isReason func(name string) bool
	found    sets.Set[string]
}

// declare records the position of the reason in a struct or function.
func (r *reader) declare(node ast.Node) bool {
	switch n := node.(type) {
	case *ast.TypeSpec:
		if fields, ok := n.Type.(*ast.StructType); ok {
			r.record(n.Name.Name, fields.Fields)
		}
	case *ast.FuncDecl:
		r.record(n.Name.Name, n.Type.Params)
	case *ast.AssignStmt:
		for i, value := range n.Rhs {
			if closure, ok := value.(*ast.FuncLit); ok {
				r.record(nameOf(n.Lhs[i]), closure.Type.Params)
			}
		}
	}
	return true
}

func (r *reader) record(name string, fields *ast.FieldList) {
	if at := position(fields); at >= 0 {
		r.positions[name] = at
	}
}

// position returns the index of the reason in a list of fields, parameters or results; -1 if there is none.
func position(fields *ast.FieldList) int {
	at := 0
	if fields == nil {
		return -1
	}
	for _, field := range fields.List {
		for _, name := range field.Names {
			if strings.EqualFold(name.Name, "reason") {
				return at
			}
			at++
		}
	}
	return -1
}

// collect adds the reasons that a node sets.
func (r *reader) collect(node ast.Node) bool {
	switch n := node.(type) {
	case *ast.ValueSpec:
		r.constant(n)
	case *ast.AssignStmt:
		for i, to := range n.Lhs {
			if len(n.Rhs) == len(n.Lhs) && r.isReason(nameOf(to)) {
				r.add(n.Rhs[i])
			}
		}
	case *ast.KeyValueExpr:
		if r.isReason(nameOf(n.Key)) {
			r.add(n.Value)
		}
	case *ast.CompositeLit:
		r.argument(n.Type, n.Elts)
	case *ast.CallExpr:
		r.argument(n.Fun, n.Args)
	case *ast.FuncDecl:
		r.result(n.Type.Results, n.Body)
	}
	return true
}

// constant adds the reasons of a declaration.
func (r *reader) constant(spec *ast.ValueSpec) {
	for i, name := range spec.Names {
		if i < len(spec.Values) && r.isReason(name.Name) {
			r.add(spec.Values[i])
		}
	}
}

// argument adds the reason among the values of a struct or the arguments of a function.
func (r *reader) argument(to ast.Expr, values []ast.Expr) {
	if at, known := r.positions[nameOf(to)]; known && at < len(values) {
		r.add(values[at])
	}
}

// result adds the reasons that a function returns.
func (r *reader) result(results *ast.FieldList, body *ast.BlockStmt) {
	at := position(results)
	if at < 0 {
		return
	}
	ast.Inspect(body, func(node ast.Node) bool {
		if n, ok := node.(*ast.ReturnStmt); ok && at < len(n.Results) {
			r.add(n.Results[at])
		}
		return true
	})
}

// add adds the value of an expression if it is a string literal.
func (r *reader) add(value ast.Expr) {
	if literal, ok := value.(*ast.BasicLit); ok && literal.Kind == token.STRING {
		if text, err := strconv.Unquote(literal.Value); err == nil && text != "" {
			r.found.Insert(text)
		}
	}
}

// isReason reports whether a name is that of a reason.
func isReason(name string) bool { return strings.HasPrefix(strings.ToLower(name), "reason") }

// nameOf returns the last name of an expression; empty if it has none.
func nameOf(expression ast.Expr) string {
	switch e := expression.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}
