export function html(parts: TemplateStringsArray, ...values: unknown[]): unknown;
export function render(what: unknown, where: Element | null): void;
export function useState<T>(first: T): [T, (next: T | ((before: T) => T)) => void];
export function useEffect(what: () => void | (() => void), inputs?: unknown[]): void;
export function useRef<T>(first: T): { current: T };
