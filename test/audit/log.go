package audit

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
)

// Policy is an audit.k8s.io/v1 Policy for Log.Read: every request of service accounts, but for the cluster's own.
const Policy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  userGroups: ["system:serviceaccounts:kube-system"]
- level: Metadata
  userGroups: ["system:serviceaccounts"]
- level: None
`

// Request is what somebody asked for, without what does not matter for rights.
type Request struct {
	User, Verb, Group string
	// Resource has its subresource, if any, as in "pods/status".
	Resource string
	// Namespace and Name are empty where the request has none.
	Namespace, Name string
}

func (r Request) String() string {
	return fmt.Sprintf("%s: %s %s %s/%s", r.User, r.Verb, resourceName(r.Resource, r.Group), r.Namespace, r.Name)
}

func resourceName(resource, group string) string {
	if group == "" {
		return resource
	}
	return resource + "." + group
}

// Log is what the logs of an API server tell.
type Log struct {
	// granted are the requests that somebody had the right to, whatever became of them.
	granted map[Request]bool
	// refused are those that somebody had no right to, and why.
	refused map[Request]string
	// insecure are those whose pods the audited pod security standard would refuse, and why.
	insecure map[Request]string
}

// NewLog returns an empty log.
func NewLog() *Log { return &Log{map[Request]bool{}, map[Request]string{}, map[Request]string{}} }

// ReadFiles adds the files of a log.
func (l *Log) ReadFiles(paths ...string) error {
	for _, path := range paths {
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		err = l.Read(file)
		if err := errors.Join(err, file.Close()); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// event is what is read of an audit.k8s.io/v1 Event.
type event struct {
	Verb string `json:"verb"`
	User struct {
		Username string `json:"username"`
	} `json:"user"`
	ImpersonatedUser *struct {
		Username string `json:"username"`
	} `json:"impersonatedUser"`
	ObjectRef *struct {
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
		Group       string `json:"apiGroup"`
		Namespace   string `json:"namespace"`
		Name        string `json:"name"`
	} `json:"objectRef"`
	ResponseStatus struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	} `json:"responseStatus"`
	Annotations map[string]string `json:"annotations"`
}

const (
	// decisionAnnotation is what the authorizer has decided on the request itself: allow or forbid.
	decisionAnnotation = "authorization.k8s.io/decision"
	// insecureAnnotation is why pods, or those of a template, would be refused by the standard that their namespace audits.
	insecureAnnotation = "pod-security.kubernetes.io/audit-violations"
)

// Read adds a log: a JSON object a line. Requests for what is no object, as for versions, are left out, and a last line that is still
// being written.
func (l *Log) Read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for number := 1; ; number++ {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("line %d: %w", number, err)
		}
		e := event{}
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("line %d: %w", number, err)
		}
		l.add(e)
	}
}

func (l *Log) add(e event) {
	if e.ObjectRef == nil {
		return
	}
	r := Request{User: e.User.Username, Verb: e.Verb, Group: e.ObjectRef.Group, Resource: e.ObjectRef.Resource, Namespace: e.ObjectRef.Namespace, Name: e.ObjectRef.Name}
	if e.ImpersonatedUser != nil {
		r.User = e.ImpersonatedUser.Username
	}
	if e.ObjectRef.Subresource != "" {
		r.Resource += "/" + e.ObjectRef.Subresource
	}
	if why := e.Annotations[insecureAnnotation]; why != "" {
		l.insecure[r] = why
	}
	switch {
	case e.Annotations[decisionAnnotation] == "forbid":
		l.refused[r] = e.ResponseStatus.Message
		return
	case e.ResponseStatus.Code == http.StatusForbidden && lacksRight(e.ResponseStatus.Message):
		l.refused[r] = e.ResponseStatus.Message
	}
	l.granted[r] = true
	// What is applied and does not exist is created, and the right to that is asked for while the request is answered.
	if e.Verb == "patch" && e.ResponseStatus.Code == http.StatusCreated {
		r.Verb = "create"
		l.granted[r] = true
	}
}

// Refused are the requests that somebody had no right to and that no grant permits, with the reason, in order. Those that one permits
// were made while its binding was not there.
func (l *Log) Refused(grants []Grant) ([]string, error) {
	lacking := maps.Clone(l.refused)
	for i := range grants {
		rights, err := grants[i].rights()
		if err != nil {
			return nil, err
		}
		for _, right := range rights {
			maps.DeleteFunc(lacking, func(r Request, why string) bool { return right.permits(r) && !lacksRight(why) })
		}
	}
	return told(lacking), nil
}

// InsecureContainers are the names of the containers, init containers too, for which pods would be refused by the standard that their
// namespace audits, each with a request and the whole reason. What is wrong with a volume is no container's. The security context of
// a pod in which users is such a container is the user's: what it may say for all its containers is not told of the others.
func (l *Log) InsecureContainers(users string) map[string]string {
	found := map[string]string{}
	for _, text := range told(l.insecure) {
		for _, part := range containerNames.FindAllString(text, -1) {
			ofPod := strings.HasPrefix(part, "pod or ") && strings.Contains(part, `"`+users+`"`)
			for _, quoted := range quotedName.FindAllStringSubmatch(part, -1) {
				if !ofPod || quoted[1] == users {
					found[quoted[1]] = text
				}
			}
		}
	}
	return found
}

var (
	containerNames = regexp.MustCompile(`(pod or )?containers? "[^"]+"(, "[^"]+")*`)
	quotedName     = regexp.MustCompile(`"([^"]+)"`)
)

// Requests is how many different requests were granted.
func (l *Log) Requests() int { return len(l.granted) }

// told are requests with what there is to say of each, in order.
func told(requests map[Request]string) []string {
	var all []string
	for r, why := range requests {
		all = append(all, r.String()+": "+why)
	}
	slices.Sort(all)
	return all
}
