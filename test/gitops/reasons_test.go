package gitops

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/sets"
)

// sources are the packages that give the conditions of a kind their reasons.
var sources = map[string][]string{
	"semmoe.io/MoEDeployment": {
		"controllers/moedeployment", "controllers/moedeployment/locality",
		"controllers/moedeployment/planner", "controllers/moedeployment/revisions", "internal/podhealth",
	},
	"semmoe.io/AffinityProfile": {"controllers/affinityprofile", "internal/podhealth"},
	"semmoe.io/PlacementPlan":   {"controllers/placementplan"},
}

// constants are further reasons of a kind, by the package that declares them: constants that go by another name.
var constants = map[string]map[string][]string{
	"semmoe.io/MoEDeployment": {
		"api/v1alpha1":                       {"VerdictNoGainExpected", "VerdictLocalityDoesNotPay"},
		"controllers/moedeployment/locality": {"OnTarget", "BelowPromise", "Drifted"},
		"internal/engine":                    {"ReasonNoAllToAll"},
		"internal/promquery":                 {"NotAllowed", "Unavailable", "Refused", "Warned", "NoSeries", "SeveralSeries"},
		"internal/rollout":                   {"ReasonStarting", "ReasonSoaking", "ReasonInconclusive"},
	},
	"semmoe.io/PlacementPlan": {"api/v1alpha1": {"VerdictNoGainExpected", "VerdictLocalityDoesNotPay"}},
}

// Every reason that the source gives a condition has been seen in an object, or is listed with what keeps it from that.
func TestReasonsHaveStates(t *testing.T) {
	for _, k := range kinds(t) {
		packages, known := sources[k.Name]
		if !known {
			continue // another project's
		}
		t.Run(k.Name, func(t *testing.T) {
			declared := sets.New[string]()
			for _, name := range packages {
				declared = declared.Union(reasonsIn(t, name))
			}
			for name, of := range constants[k.Name] {
				declared = declared.Union(constantsIn(t, name, of))
			}
			seen := sets.New[string]()
			for _, u := range k.States {
				seen = seen.Union(Reasons(u))
			}
			excused := sets.KeySet(unseen[k.Name])
			if missing := sets.List(declared.Difference(seen).Difference(excused)); len(missing) > 0 {
				t.Errorf("no state has the reasons %v: docs/gitops.md says how to collect one", missing)
			}
			if needless := sets.List(excused.Intersection(seen).Union(excused.Difference(declared))); len(needless) > 0 {
				t.Errorf("the reasons %v need no excuse: a state has them, or nothing gives them", needless)
			}
		})
	}
}

// parse reads the source of a package, without its tests.
func parse(t *testing.T, name string) []*ast.File {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", "..", filepath.FromSlash(name), "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	var parsed []*ast.File
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		syntax, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		parsed = append(parsed, syntax)
	}
	return parsed
}

// constantsIn are the values of some constants of a package.
func constantsIn(t *testing.T, name string, of []string) sets.Set[string] {
	t.Helper()
	r := reader{found: sets.New[string](), gives: func(constant string) bool { return slices.Contains(of, constant) }}
	for _, file := range parse(t, name) {
		ast.Inspect(file, func(node ast.Node) bool {
			if spec, ok := node.(*ast.ValueSpec); ok {
				r.constant(spec)
			}
			return true
		})
	}
	if len(r.found) != len(of) {
		t.Errorf("the constants %v of %s are %v", of, name, sets.List(r.found))
	}
	return r.found
}

// reasonsIn are the words that a package's source gives as a reason: to a field, a parameter or a result of that name, or as a constant
// whose name begins with it.
func reasonsIn(t *testing.T, name string) sets.Set[string] {
	t.Helper()
	r := reader{takers: map[string]int{}, found: sets.New[string](), gives: isReason}
	files := parse(t, name)
	for _, file := range slices.Concat(parse(t, "internal/conditions"), files) {
		ast.Inspect(file, r.declare)
	}
	for _, file := range files {
		ast.Inspect(file, r.collect)
	}
	if len(r.found) == 0 {
		t.Errorf("%s gives no reasons", name)
	}
	return r.found
}

// reader finds the reasons that a package gives.
type reader struct {
	// takers are the structs and functions that take a reason, by name, and at which place.
	takers map[string]int
	// gives tells that a constant, or a variable, of that name is a reason.
	gives func(name string) bool
	found sets.Set[string]
}

// declare notes what takes a reason.
func (r *reader) declare(node ast.Node) bool {
	switch n := node.(type) {
	case *ast.TypeSpec:
		if fields, ok := n.Type.(*ast.StructType); ok {
			r.take(n.Name.Name, fields.Fields)
		}
	case *ast.FuncDecl:
		r.take(n.Name.Name, n.Type.Params)
	case *ast.AssignStmt:
		for i, value := range n.Rhs {
			if closure, ok := value.(*ast.FuncLit); ok {
				r.take(nameOf(n.Lhs[i]), closure.Type.Params)
			}
		}
	}
	return true
}

func (r *reader) take(name string, fields *ast.FieldList) {
	if at := reasonAt(fields); at >= 0 {
		r.takers[name] = at
	}
}

// reasonAt is the place of the reason in a list of fields, parameters or results; -1 where there is none.
func reasonAt(fields *ast.FieldList) int {
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

// collect finds the reasons that a node gives.
func (r *reader) collect(node ast.Node) bool {
	switch n := node.(type) {
	case *ast.ValueSpec:
		r.constant(n)
	case *ast.AssignStmt:
		for i, to := range n.Lhs {
			if len(n.Rhs) == len(n.Lhs) && r.gives(nameOf(to)) {
				r.add(n.Rhs[i])
			}
		}
	case *ast.KeyValueExpr:
		if r.gives(nameOf(n.Key)) {
			r.add(n.Value)
		}
	case *ast.CompositeLit:
		r.give(n.Type, n.Elts)
	case *ast.CallExpr:
		r.give(n.Fun, n.Args)
	case *ast.FuncDecl:
		r.returned(n.Type.Results, n.Body)
	}
	return true
}

// constant takes the reasons from a declaration.
func (r *reader) constant(spec *ast.ValueSpec) {
	for i, name := range spec.Names {
		if i < len(spec.Values) && r.gives(name.Name) {
			r.add(spec.Values[i])
		}
	}
}

// give takes the reason from what a struct or a function is given.
func (r *reader) give(to ast.Expr, values []ast.Expr) {
	if at, takes := r.takers[nameOf(to)]; takes && at < len(values) {
		r.add(values[at])
	}
}

// returned takes the reason from what a function returns.
func (r *reader) returned(results *ast.FieldList, body *ast.BlockStmt) {
	at := reasonAt(results)
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

// add notes the reason that an expression is, where it is written out.
func (r *reader) add(value ast.Expr) {
	if literal, ok := value.(*ast.BasicLit); ok && literal.Kind == token.STRING {
		if text, err := strconv.Unquote(literal.Value); err == nil && text != "" {
			r.found.Insert(text)
		}
	}
}

// isReason tells that a name is that of a reason.
func isReason(name string) bool { return strings.HasPrefix(strings.ToLower(name), "reason") }

// nameOf is the last name of an expression; empty where it has none.
func nameOf(expression ast.Expr) string {
	switch e := expression.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}

// unseen are the reasons that no state has, and what keeps the end-to-end suite from seeing one.
var unseen = map[string]map[string]string{
	"semmoe.io/MoEDeployment": {
		"ReplanCooldown":       "a plan must have been in use for long, and a re-plan of it have come to nothing within the cooldown",
		"DatasetUnchanged":     "the traffic must have drifted while spec.profiling.refresh is Job",
		"DriftEnded":           "the traffic must come back before a profile of it is complete",
		"TablesRequireRestart": "an engine that shuffles tokens must have been re-planned for",
		"FailedMount":          "it is an event's; the condition says VolumeNotMounted",
		"InspectionFailed":     "the inspection must end in an error of the machine, not of the checkpoint",
		"LocalityDoesNotPay":   "no placement that is solved without one in service has this verdict; the PlacementPlan of a re-plan tells it",
		"NoDataset":            "the schema refuses refresh Job without a data set",
		"NodeLost":             "the node of the suite is one with the cluster; test/installation loses one",
		"NotEvaluated":         "the first look at a MoEDeployment must fail half-way",
		"TablesNotLoaded":      "the routers must serve, and not have loaded the tables of the plan in service yet",
		"NoTrafficSamples":     "a Prometheus server must tell of drift while spec.routing.samplePercent is 0",
		"LayoutMismatch":       "spec.placement must ask for other copies than a plan in service has, and its traffic drift",
		"RanksIgnored":         "an engine must ignore the rank of requests, as in the story of that; its state is not collected yet",
		"TiedEmbeddings":       "SGLang must be told to serve a checkpoint that ties its embeddings, as in the story of that; its state is not collected yet",
		"RoutersUnreachable":   "all request routers must be away while a plan is in service, and drift be looked at",
		"SecretUnreadable":     "the API server must fail while it is asked for one Secret alone",
		"UnknownEngine":        "the schema knows the engines",
	},
	"semmoe.io/AffinityProfile": {
		"FailedMount":      "it is an event's; the condition says VolumeNotMounted",
		"InspectionFailed": "the inspection must end in an error of the machine, not of the inputs",
		"NodeLost":         "the node of the suite is one with the cluster; test/installation loses one",
		"NotReady":         "a container of a profiling Job must start, and then fail its readiness probe for a minute",
		"ProfilingFailed":  "a Job must end in an error that is neither its inputs' nor its engine's",
		"UnknownEngine":    "the schema knows the engines",
		"Queued":           "two profiles of live samples must be complete within the second that one is read in",
	},
	"semmoe.io/PlacementPlan": {
		"ArtifactsLost":           "it is told for as long as a lost plan is being solved again",
		"InvalidPlacement":        "the conditions are those of InvalidExpertParallelSize, but for this word",
		"PlanUnusable":            "the map of a plan must be larger than a ConfigMap may be",
		"ProfileInvalid":          "the store must hold a profile that no release has written",
		"StableConfigMapOutdated": "a lost plan must be solved again as another one",
	},
}
